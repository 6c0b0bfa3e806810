"""Serves the files of the dashboard, `echo2d/web/`, and nothing else, to everybody.

    GET /               index.html
    GET /page/{name}    its scripts, style and icon

The files are read once, at the start. They hold no fact of a run: the page asks for those with the
secret that a person types in. Its content security policy lets it contact this coordinator only, and
lets no script make HTML out of text. A browser that asks under a name that is not this run's is refused.
"""

import ipaddress
from collections.abc import Collection, Mapping
from http import HTTPStatus
from importlib import resources

from aiohttp import web
from aiohttp.typedefs import Middleware

from echo2d.net.http.json_fields import Handler, HttpRefusal

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


# --- a browser that asks under a name that is not this run's is refused
#
# A stranger's page can let its own name point to the address of this host (DNS rebinding). The
# browser then takes that page and the dashboard for one site, so the page could read what people
# type into the dashboard. So a browser must ask under an address, as localhost, or under a name that the
# operator gave. Programs are not checked: they show a secret that no browser holds.


def known_names(names: Collection[str]) -> Middleware:
    """A middleware. names: the names under which people reach the coordinator, without port."""
    known = frozenset(name.lower().rstrip(".") for name in names)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Browsers send Sec-Fetch-Site with every request, and Origin with those of scripts.
        browser = request.path == "/" or any(
            each in request.headers for each in ("Sec-Fetch-Site", "Origin")
        )
        if browser and not _is_known(request.headers.get("Host", ""), known):
            raise HttpRefusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                "host",
                "this coordinator is not known by that name; use its address, or add the name to "
                "coordinator.names",
            )
        return await handler(request)

    return check


def _is_known(host: str, known: Collection[str]) -> bool:
    """host: from the Host header, usually with a port."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if name in known or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
