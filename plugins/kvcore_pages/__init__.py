"""Pages: HTML that plays a run, reports results, or explains the cache."""
