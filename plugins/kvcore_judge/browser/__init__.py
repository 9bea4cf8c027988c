"""The page of the workbench: its markup, its scripts, and a module for its Python.

`page.html`, `page.css` and `page.js` are what is seen; `worker.js` runs Python beside the page,
and `offline.js` keeps the files of the site. `json_for_orjson.py` is `orjson` there.
"""
