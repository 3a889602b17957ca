"""Asking a server that runs: with the key, and with what goes wrong told in a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.errors import EngineError, InvalidRequest, NetworkUnavailable

if TYPE_CHECKING:
    import httpx2


@contextmanager
def asking(url: str) -> Iterator[httpx2.Client]:
    """A client of the server at `url`, with the first key in OCTAVO_API_KEY.

    Raises:
        InvalidRequest: `url` is no address, or the server wants another key.
        NetworkUnavailable: nobody answers.
        EngineError: it is not Octavo's server.
    """
    import httpx2

    key = os.environ.get("OCTAVO_API_KEY", "").split()
    headers = {"Authorization": f"Bearer {key[0]}"} if key else {}
    try:
        with httpx2.Client(base_url=url, headers=headers, timeout=30.0) as client:
            yield client
    except httpx2.InvalidURL as error:
        raise InvalidRequest(f"{url!r} is not an address ({error}). Write http://HOST:PORT.") from error
    except httpx2.UnsupportedProtocol as error:
        raise InvalidRequest(f"{url!r} is not an address of HTTP. Write http://HOST:PORT.") from error
    except httpx2.HTTPStatusError as error:
        if error.response.status_code == 401:
            raise InvalidRequest(
                f"The server at {url} wants a key. Set OCTAVO_API_KEY to one that it accepts."
            ) from error
        raise _not_ours(error.request.url, error) from error
    except httpx2.HTTPError as error:
        raise NetworkUnavailable(
            f"No server answers at {url} ({error}). Start one with octavo serve, or give its address."
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _not_ours(url, error) from error


def _not_ours(address: object, error: Exception) -> EngineError:
    return EngineError(f"{address} did not answer as expected ({error}). Is it Octavo's server?")
