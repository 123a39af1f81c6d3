"""A REST app over a scripted engine: no model, no Ray. Tests of the whole application take the `local_ray` too."""

from pathlib import Path

import pytest
from fastapi import FastAPI

from cluster.api.http.routes import make_app
from tests.actors.conftest import local_ray as local_ray
from tests.api.scripted import Client, ScriptedService, save_tokenizer


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
