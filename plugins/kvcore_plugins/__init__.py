"""The plugins that come with kvcore, registered through the entry points anyone can use."""

import kvcore  # noqa: F401 - it finds modules by their former names
