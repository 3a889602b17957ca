"""How a sealed page is encoded: how many bytes it takes, and a plain encoder and decoder of it."""

from octavo.formats.page_format import FORMATS, PageFormat, get_format

__all__ = ["FORMATS", "PageFormat", "get_format"]
