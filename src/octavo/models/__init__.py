"""Models: names, downloads, files, and loading them with dense weights."""
