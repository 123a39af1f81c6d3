"""Fixtures of a REST app over a scripted engine, without model and Ray. Tests of the whole app also use `local_ray`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.api.http.routes import make_app
from tests.serving.actors.conftest import local_ray as local_ray
from tests.serving.api.listening import listening
from tests.serving.api.scripted import Client, ScriptedService, save_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def service(tokenizer_folder: Path) -> ScriptedService:
    return ScriptedService(tokenizer_folder)


@pytest.fixture
def app(service: ScriptedService) -> FastAPI:
    return make_app(service)


@pytest.fixture
def client(app: FastAPI) -> Client:
    return Client(app)


@pytest.fixture
def document(client: Client) -> dict[str, Any]:
    """The app's OpenAPI document."""
    document_dict: dict[str, Any] = client.get("/openapi.json").json()
    return document_dict


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    with listening(app) as address:
        yield address


@pytest.fixture
def openai(url: str) -> Iterator[Any]:
    """OpenAI's official client, connected to the app."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(url: str) -> Iterator[Any]:
    """Anthropic's official client, connected to the app."""
    from anthropic import Anthropic

    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client
