"""How a sealed page is encoded. A format says how many bytes a page takes and whether it loses anything."""

from octavo.formats.page_format import PageFormat, get_format

__all__ = ["PageFormat", "get_format"]
