"""The packages that the files of today will belong to, and the order of these packages."""

from fnmatch import fnmatch

CORE = "core"

ORDER = [
    {CORE},
    {"kvcore_plugins"},
    {"kvcore_tiers", "kvcore_events", "kvcore_hosting"},
    {"kvcore_cluster", "kvcore_engine"},
    {"kvcore_replay"},
    {"kvcore_lab"},
    {"kvcore_pages", "kvcore_online"},
    {"kvcore_testing", "kvcore_vllm"},
]
"""The packages from left to right: one imports itself and packages to the left of it."""

_BUILT_IN = "plugins/kvcore_plugins"


def _files(folder, *names):
    """Return the paths of Python files in a folder, by their names without suffix."""
    return [f"{folder}/{name}.py" for name in names]


PACKAGES = {
    "kvcore_plugins": [
        f"{_BUILT_IN}/*",
        *_files("kvcore/engine", "dtypes"),
        *_files("kvcore/serving", "acceptance", "measured_steps", "step_times"),
        "kvcore/workloads/logged.py",
    ],
    "kvcore_tiers": [
        f"{_BUILT_IN}/tier/*",
        *_files("kvcore/tiers", "hierarchy", "level", "link"),
    ],
    "kvcore_events": [
        "kvcore/kv_events/*",
        "kvcore/cli/record.py",
        f"{_BUILT_IN}/workload/kv_events.py",
    ],
    "kvcore_hosting": ["kvcore/hosting/*"],
    "kvcore_cluster": [
        f"{_BUILT_IN}/router/*",
        "kvcore/cluster/[!_r]*",
        *_files("kvcore/cluster", "replica", "result"),
        "kvcore/config/cluster.py",
        "kvcore/report/cluster.py",
        "kvcore/trace/cluster.py",
    ],
    "kvcore_engine": [
        *(f"{_BUILT_IN}/{kind}/*" for kind in ("backend", "generator")),
        *_files(f"{_BUILT_IN}/drafter", "draft_model", "medusa", "prompt_lookup"),
        *_files(f"{_BUILT_IN}/retention", "[!_f]*"),
        "kvcore/bench/*",
        *_files("kvcore/cli", "bench", "run"),
        *_files("kvcore/engine", "compaction", "drafter", "engine", "executor", "retention"),
        *_files("kvcore/engine", "speculation", "tiers", "tokens"),
        "kvcore/report/bench.py",
    ],
    "kvcore_replay": [
        *_files("kvcore/analysis", "belady", "billing", "miss*", "prompt_misses"),
        *_files("kvcore/analysis", "recorded_run", "serial_replay", "timeline", "what_if"),
        *_files("kvcore/cli", "export", "live", "plot", "replay", "watch"),
        "kvcore/config/recorded*",
        "kvcore/kv_events/export.py",
        "kvcore/models/pricing.py",
        *_files("kvcore/report", "billing", "charts", "figure", "live", "misses", "perfetto"),
        *_files("kvcore/report", "plots", "whatif"),
        *_files("kvcore/trace", "*check", "layout", "lifecycle", "re[ps]*", "state", "tiers"),
    ],
    "kvcore_lab": [
        *("kvcore/analysis/*", "kvcore/demo/*"),
        *_files("kvcore/cli", "calibrate", "compare", "curve", "demo", "explain", "plan"),
        *_files("kvcore/cli", "quality", "routers", "size", "sweep", "validate"),
        *_files("kvcore/report", "comparison*", "mrc", "notebook", "paging", "plan", "plane"),
        *_files(
            "kvcore/report", "policies", "prometheus", "quality", "routers", "size", "sweep"
        ),
        "kvcore/report/validation.py",
        *_files("kvcore/serving", "aic", "calibration", "contiguous"),
    ],
    "kvcore_pages": ["kvcore/pages/*", *_files("kvcore/cli", "report", "tour", "view")],
    "kvcore_online": ["kvcore/online/*", *_files("kvcore/cli", "route", "serve")],
    "kvcore_testing": ["kvcore/testing/*"],
    "kvcore_vllm": ["kvcore/serving/vllm_steps.py"],
}
"""The files of today that a package will have, as globs of which the longest counts.

A file that no glob names will be of the core.
"""


def package(path):
    """Return the package that the file at `path`, relative to the repository, will be in."""
    globs = [
        (len(glob), name)
        for name, some in PACKAGES.items()
        for glob in some
        if fnmatch(path, glob)
    ]
    return max(globs)[1] if globs else CORE
