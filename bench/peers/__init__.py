"""Octavo beside other engines: the same prompts in one sitting, each engine in a process of its own."""
