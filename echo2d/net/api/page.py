"""Serves the files of the dashboard, `echo2d/web/`: nothing but them, to anybody.

    GET /               index.html
    GET /page/{name}    its scripts, style and icon

They are read once, at the start. They hold no fact of a run: the page asks for those with the secret
that a person types in. Its policy lets it load and ask this coordinator only, and lets no script
make HTML out of text.
"""

from collections.abc import Mapping
from importlib import resources

from aiohttp import web

from echo2d.net.http.json_fields import Handler

# The content security policy of an answer that is no page: it may load, embed or send nothing.
NOTHING_ELSE = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
POLICY = (
    f"{NOTHING_ELSE}; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
INDEX = "index.html"
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


def read_page() -> dict[str, bytes]:
    """The files of the dashboard by name. Blocking."""
    folder = resources.files("echo2d").joinpath("web")
    return {file.name: file.read_bytes() for file in folder.iterdir() if _type(file.name)}


def serve_page(app: web.Application, files: Mapping[str, bytes]) -> None:
    app.router.add_get("/", _show(INDEX, files[INDEX]))
    for name, body in files.items():
        if name != INDEX:
            app.router.add_get(f"/page/{name}", _show(name, body))


def _type(name: str) -> str | None:
    return TYPES.get(name.rpartition(".")[2])


def _show(name: str, body: bytes) -> Handler:
    # A browser asks again after each start of the coordinator, which may be another build.
    headers = {"Cache-Control": "no-cache"}
    if name == INDEX:
        headers["Content-Security-Policy"] = POLICY
    kind = _type(name)

    async def show(request: web.Request) -> web.Response:  # noqa: ARG001 - aiohttp's signature
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return show
