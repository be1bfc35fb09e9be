"""The playground: static files and their Content-Security-Policy."""

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

PLAYGROUND = Path(__file__).parent / "playground"

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "require-trusted-types-for 'script'",  # no script may parse text as HTML
    "trusted-types 'none'",
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(_POLICY),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",  # else browsers look up the hosts of links in outputs
}


async def page(request: Request) -> Response:
    """Serve the playground: index.html, and the files that it links to, by name."""
    name = request.path_params.get("name", "index.html")
    files = (path for path in PLAYGROUND.rglob("*") if path.is_file())
    if name not in {path.relative_to(PLAYGROUND).as_posix() for path in files}:
        raise HTTPException(404)
    return FileResponse(PLAYGROUND / name, headers=_HEADERS)
