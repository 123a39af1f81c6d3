"""/docs: a page that lists all routes and fields, and loads no other resource."""

import re
from html.parser import HTMLParser
from typing import Any

from cluster.api.core.conversation import ChatRequest
from cluster.api.core.generation import CompletionRequest
from cluster.api.http.openapi import render_page
from tests.serving.api.scripted import Client

VOID = {"meta"}


class ParsedPage(HTMLParser):
    """A parsed page: the attributes of all tags as (tag, name, value), and the text. Every tag must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open_tags, f"never closed: {self.open_tags}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_docs_page_names_every_route_and_request_field(client: Client, document: dict[str, Any]) -> None:
    response = client.get("/docs")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    text = ParsedPage(response.text).text
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in text
    for name in (*CompletionRequest.model_fields, *ChatRequest.model_fields, "max_new_tokens"):
        assert name in text


def test_docs_page_loads_no_external_resources(client: Client) -> None:
    response = client.get("/docs")
    page = ParsedPage(response.text)
    links = [(tag, name, value) for tag, name, value in page.attributes if name in ("src", "href", "action", "srcset")]
    assert links == [("a", "href", "openapi.json")]
    assert "<script" not in response.text and "url(" not in response.text and "@import" not in response.text
    assert not re.search(r"https?:", response.text)
    assert response.headers["content-security-policy"].startswith("default-src 'none'")


def test_docs_page_escapes_html_of_the_openapi_document() -> None:
    """The page escapes every text of the document, also a description that is not from this repository."""
    evil = "<script>alert(1)</script>"
    schema = {"properties": {evil: {"type": evil, "default": evil}}, "description": evil}
    operation = {
        "description": evil,
        "requestBody": {"content": {evil: {"schema": {"$ref": "#/components/schemas/E"}}}},
        "responses": {evil: {"description": evil}},
    }
    page = render_page(
        {"info": {"title": evil, "version": evil}, "paths": {evil: {evil: operation}},
         "components": {"schemas": {"E": schema}}}
    )  # fmt: skip
    assert "<script" not in page.lower()
    assert ParsedPage(page).text.count(evil) >= 6
