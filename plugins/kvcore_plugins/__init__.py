"""The plugins that come with kvcore, registered through the entry points anyone can use."""
