"""Why prompts missed: reasons by request and in total."""
