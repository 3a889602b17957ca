"""Text before and after a gap: llama.cpp's interface, which editors' plugins speak."""
