"""Conversations that are kept in the store on disk, each under an id, to be gone on with after a restart."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.errors import InvalidConversation
from octavo.kv.storage.records import Document

KIND = "conversation"


class Documents(Protocol):
    """Where they are kept: a store, or a tier."""

    def put_document(self, document: Document) -> object: ...
    def documents(self, kind: str) -> Iterable[Document]: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept conversation. `data` is what `Conversation.to_dict` gave; `fingerprint` is its model's."""

    id: str
    tenant: str
    model: str
    fingerprint: str
    saved_s: float
    data: Mapping[str, Any]

    @property
    def num_turns(self) -> int:
        return len(self.data["turns"])

    @property
    def title(self) -> str:
        """How it begins."""
        turns = self.data["turns"]
        return " ".join(str(turns[0]["user"]).split()) if turns else ""

    @property
    def token_ids(self) -> list[int]:
        """Everything the model saw and said."""
        return [
            id_ for turn in self.data["turns"] for part in ("prompt", "answer") for id_ in turn[part]["ids"]
        ]

    def to_document(self) -> Document:
        values = {
            "id": self.id,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "saved_s": self.saved_s,
            "conversation": dict(self.data),
        }
        return Document(KIND, self.id.encode(), json.dumps(values).encode(), self.tenant, self.saved_s)


def new_id() -> str:
    """An id for a conversation: eight letters and digits."""
    return secrets.token_hex(4)


def keep(documents: Documents, data: Mapping[str, Any], *, id: str, tenant: str, fingerprint: bytes) -> Kept:
    """Keep a conversation's state under `id`, in place of what was kept there before."""
    kept = Kept(id, tenant, str(data["model"]), fingerprint.hex(), time.time(), data)
    documents.put_document(kept.to_document())
    return kept


def kept(documents: Documents) -> list[Kept]:
    """All kept conversations, the latest first."""
    found = []
    for document in documents.documents(KIND):
        try:
            values = json.loads(document.data)
            item = Kept(
                *(str(values["id"]), document.tenant, str(values["model"]), str(values["fingerprint"])),
                *(float(values["saved_s"]), values["conversation"]),
            )
            item.token_ids, item.title  # noqa: B018 (what is not whole is left out)
        except (ValueError, KeyError, TypeError):
            continue
        found.append(item)
    return found


def find(documents: Documents, wanted: str, tenant: str | None = None) -> Kept:
    """The kept conversation whose id begins with `wanted`; the latest one if that is "last".

    Raises:
        InvalidConversation: there is none, or several.
    """
    all_ = [item for item in kept(documents) if tenant is None or item.tenant == tenant]
    found = all_[:1] if wanted == "last" else [item for item in all_ if item.id.startswith(wanted)]
    exact = [item for item in found if item.id == wanted]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        raise InvalidConversation(
            f"{len(found)} kept conversations have an id that begins with {wanted!r}. Write more of it."
        )
    raise InvalidConversation(
        f"No conversation is kept under {wanted!r}. `octavo cache ls` lists those that are; "
        "`octavo chat MODEL --save` keeps one."
    )


def check_model(item: Kept, *, name: str, fingerprint: bytes) -> None:
    """Checks that a model is the one that a conversation was held with.

    Raises:
        InvalidConversation: it is not; the message names both.
    """
    if item.fingerprint != fingerprint.hex():
        raise InvalidConversation(
            f"Conversation {item.id} was held with {item.model!r} (content {item.fingerprint[:12]}), which is not the "
            f"model {name!r} (content {fingerprint.hex()[:12]}). Go on with it with the model it was held with."
        )
