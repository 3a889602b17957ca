"""Where the bytes of pages lie. Storage knows keys and bytes, never what they mean."""
