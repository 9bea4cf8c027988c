"""The options of a run, each declared once: for Python, the command line, TOML and sweeps.

An option is an entry of a `TypedDict`: its name, its type, and an `Option` with all else that
is known of it. Type checkers read the keywords of `kvcore.simulate` from these classes. The
flags of verbs, the keys of TOML files, the axes of sweeps, the options that a what-if may
change, and the schemas are made of the same entries. Packages declare the options of their
modes in this way too.
"""

# Without `from __future__ import annotations`: the annotations are read when they are needed.

import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    NamedTuple,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
)

from kvcore.config.values import (
    ByteSize,
    CheckpointChoice,
    DeviceChoice,
    ModelChoice,
    Natural,
    PluginChoice,
    SLOChoice,
    TierChoices,
    WindowChoice,
    WorkloadChoice,
    convert,
    shown,
)
from kvcore.errors import InputError, KvcoreError
from kvcore.hookspecs import MODEL, POLICIES, POOL, REQUESTS, STEPS, Mode
from kvcore.models.spec import WeightDtype
from kvcore.plugins.base import FAILURES
from kvcore.plugins.manager import KINDS, Plugins, imported_place, installed, resolve
from kvcore.plugins.options import Spec, as_text, nearest
from kvcore.request import SLO
from kvcore.serving import Batching
from kvcore.serving.rules import CHOICES, Rules, with_choices
from kvcore.units import NS_PER_S
from kvcore.workloads.selection import BUNDLED


class Option(NamedTuple):
    """The declaration of an option: all that is known of it, with its name and its type.

    Attributes:
        default: its value if none is given, as its type has it.
        help: what it is, as help pages and schemas say it.
        heading: the heading of help pages that it is listed under; empty: a keyword of calls,
            and no flag. A verb has the flags of the groups in `options.py` of the command line.
        what_if: its help text where a recorded run is made again with another value, True if
            that is `help`; empty if a recorded run cannot have another value.
        metavar: the word for its value on help pages, if it is text that `read` reads; None: a
            number or one of several choices, which the command line reads.
        choices: the values that it may have, if they are few and its type does not say.
        optional: whether `none`, a text or a table, leaves it out, as None does.
        multiple: whether a command line may give it several times.
        earlier: its name in earlier releases.
        name, type: the key and the type of its entry.
    """

    default: Any
    help: str
    heading: str
    what_if: str | bool = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    multiple: bool = False
    earlier: str | None = None
    name: str = ""
    type: Any = None

    def read(self, value: Any) -> Any:
        """Return a value as the type of the option has it.

        Raises:
            InputError: a value that the option cannot have; begins with its name.
        """
        if self.optional and value in (Spec("none"), {"name": "none"}):
            value = "none"
        try:
            read = convert(value, Literal[self.choices] if self.choices else self.type)
        except InputError as error:
            msg = f"{self.name}: {error}"
            raise InputError(msg) from error
        return None if self.optional and read in ("none", Spec("none")) else read


def policy(default: str | None, about: str, what_if: str = "", **more: Any) -> Option:
    """Return the declaration of a policy: a plugin that None leaves out if that is its default.

    A recorded run may have another one; `what_if` is its help text there, if not `about`.
    """
    spec, optional = default and Spec(default), default is None
    return Option(spec, about, POLICIES, what_if=what_if or True, optional=optional, **more)


@cache
def declared(entries: type) -> Mapping[str, Option]:
    """Return the options that a TypedDict declares, by name; it may have other entries."""
    options = {}
    hints: Mapping[str, Any] = entries.__annotations__
    if any(isinstance(hint, ForwardRef) for hint in hints.values()):  # written as texts
        hints = get_type_hints(entries, include_extras=True)
    for name, hint in hints.items():
        if get_origin(hint) is Annotated and isinstance(hint.__metadata__[-1], Option):
            # `Annotated[Annotated[T, read], option]` is flat.
            inner, *marks = get_args(hint)[:-1]
            kind = Annotated[inner, *marks] if marks else inner
            option = hint.__metadata__[-1]
            is_plugin = kind_of(name) in KINDS and not option.metavar
            metavar = "PLUGIN" if is_plugin else option.metavar
            options[name] = option._replace(name=name, type=kind, metavar=metavar)
    return options


def kind_of(option: str) -> str:
    """Return the kind of plugin that an option names, if it names one."""
    return "rules" if option == "like" else option


EXPECTED = SLO(ttft_ns=30 * NS_PER_S, tpot_ns=NS_PER_S // 10)
"""The SLO of the authors of the bundled trace for their system: Qin et al., "Mooncake: a
KVCache-centric disaggregated architecture for LLM serving", 2024, on real workloads."""

CAPS = Batching()


class PoolOptions(TypedDict, total=False):
    """Options of the model, the devices, and the pool of blocks with its policies."""

    model: Annotated[
        ModelChoice | None,
        Option(
            "llama-3.1-8b",
            "Model that is served: a name that `kvcore size --help` lists, or a config.json.",
            MODEL,
            what_if=True,
            metavar="TEXT",
        ),
    ]
    device: Annotated[
        DeviceChoice,
        Option(
            "h100",
            "GPU that the model is served on: a name that `kvcore size --help` lists, figures "
            "such as memory=141GB,bandwidth=4.8TB,flops=989T, or both: h100:memory=84.9GB.",
            MODEL,
            what_if=True,
            metavar="TEXT",
        ),
    ]
    tensor_parallel: Annotated[
        int, Option(4, "Number of GPUs that share the model.", MODEL, what_if=True)
    ]
    codec: Annotated[
        PluginChoice | None,
        Option(
            Spec("fp16"),
            "Codec: how K/V is kept, such as fp16, int8 or kivi:bits=2.",
            MODEL,
            earlier="kv_dtype",
        ),
    ]
    """It sizes the pool and times its reads. On tensors None keeps numbers as computed."""
    weights_dtype: Annotated[
        WeightDtype | None,
        Option(None, "Number format of the weights, if not as released.", MODEL),
    ]
    block_size: Annotated[
        int | None,
        Option(
            None,
            "Number of tokens in a KV block.",
            POOL,
            what_if="Number of tokens in a KV block, in a pool of the same memory.",
        ),
    ]
    """None: 16 under a clock, otherwise as many as in a key of the workload."""
    blocks: Annotated[
        int | None, Option(None, "Number of KV blocks in the pool.", POOL, what_if=True)
    ]
    """None, without `memory`: as many as fit beside the weights."""
    memory: Annotated[
        ByteSize | None,
        Option(
            None,
            "Bytes of K/V in the pool, such as 40GiB, in place of a number of blocks.",
            POOL,
            what_if=True,
            metavar="SIZE",
        ),
    ]
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        Option(
            default=False,
            help="Serve a model whose layers keep different things as one cache group, in "
            "which all of them keep all tokens.",
            heading=POOL,
        ),
    ]
    tier: Annotated[
        TierChoices,
        Option(
            (),
            "Tier below the pool, such as host:memory=64GiB; several are given nearest first.",
            POOL,
            what_if="Tier below the pool, nearest first, such as host:memory=64GiB, or `none`.",
            multiple=True,
        ),
    ]
    eviction: Annotated[
        PluginChoice, policy("lru", "Eviction policy: which cached blocks leave a full pool.")
    ]
    prefix: Annotated[
        PluginChoice, policy("radix", "Prefix cache: which cached blocks a prompt can reuse.")
    ]
    checkpoint: Annotated[
        CheckpointChoice,
        policy(
            "default",
            "Checkpoint policy: where windows and states of a hybrid model stay cached.",
            metavar="PLUGIN",
            earlier="prefix_cache_retention_interval",
        ),
    ]
    """Has an effect with cache groups alone."""
    retention: Annotated[
        PluginChoice | None,
        policy(
            None,
            "Retention policy: which tokens a running sequence keeps.",
            "Retention policy: which blocks a running sequence drops, or `none`.",
        ),
    ]


class StepOptions(TypedDict, total=False):
    """The limits of a step, as `Batching` has them."""

    max_tokens: Annotated[
        int, Option(CAPS.max_tokens, "Largest number of tokens in a step.", STEPS, what_if=True)
    ]
    max_seqs: Annotated[
        int,
        Option(CAPS.max_seqs, "Largest number of sequences in a step.", STEPS, what_if=True),
    ]
    steps: Annotated[
        Literal["mixed", "prefill-first"],
        Option(
            CAPS.steps,
            "Steps that prefill and decode together (mixed), or steps that decode only when no "
            "prompt is left to prefill (prefill-first).",
            STEPS,
            what_if=True,
        ),
    ]
    chunked: Annotated[
        bool,
        Option(CAPS.chunked, "Prefill a long prompt over several steps.", STEPS, what_if=True),
    ]
    watermark: Annotated[
        float,
        Option(
            CAPS.watermark,
            "Share of the blocks that an admission leaves for running sequences.",
            STEPS,
            what_if=True,
        ),
    ]
    max_model_len: Annotated[
        int | None,
        Option(
            None,
            "Largest number of tokens of a sequence: a longer prompt is rejected, and the "
            "output ends there.",
            STEPS,
        ),
    ]


class SimulateOptions(PoolOptions, StepOptions, total=False):
    """Options of a run under a clock: the keywords of `kvcore.simulate`.

    `batching` has several of `StepOptions` in one object or table.
    """

    batching: Batching | Mapping[str, Any] | None
    like: Annotated[
        PluginChoice | None,
        policy(
            None,
            "Rules of an engine, such as vllm or vllm:lag=0, whose options are the defaults of "
            "all others; `kvcore simulate --like vllm --show` prints them.",
            "Rules of an engine, such as vllm:lag=0; limits and policies stay.",
        ),
    ]
    """`RunConfig(...)` has its defaults; `changed` leaves the other options as they are."""
    scheduler: Annotated[
        PluginChoice, policy("fcfs", "Scheduler: which requests run in the next step.")
    ]
    latency: Annotated[
        PluginChoice, policy("roofline", "Latency model: how many seconds a step takes.")
    ]
    drafter: Annotated[
        PluginChoice | None,
        policy(
            None,
            "Drafter: which tokens the model verifies in one step of speculative decoding.",
            "Drafter: how many drafts a step accepts, or `none`.",
        ),
    ]
    rate_scale: Annotated[
        float,
        Option(
            1.0,
            "Factor on the rate at which recorded requests arrive.",
            REQUESTS,
            what_if="Factor on the rate at which requests of the workload arrive.",
        ),
    ]
    slo: Annotated[
        SLOChoice,
        Option(
            EXPECTED,
            "Expected latency in seconds, by ttft, tpot and deadline; `none` expects nothing.",
            REQUESTS,
            what_if="Expected latency in seconds, or `none`; judges the recorded run too.",
            metavar="SLO",
        ),
    ]
    """Of requests that have none of their own; `SLO()`: no expectation."""
    seed: Annotated[
        int | None, Option(0, "Seed of plugins that draw random numbers.", POLICIES)
    ]
    """Of plugins with an option `seed` that is not set; None: their own default."""
    limit: Annotated[
        Natural | None,
        Option(
            None,
            "Largest number of requests to take, the first ones; 0 takes all.",
            REQUESTS,
            metavar="INTEGER",
        ),
    ]
    """Of those that arrive in the window. None: all, and on tensors 20."""
    window: Annotated[
        WindowChoice | None,
        Option(
            None,
            "Seconds of the workload to take, START:END: from START on and before END; either "
            "may be left out.",
            REQUESTS,
            metavar="START:END",
        ),
    ]


class SourceOptions(TypedDict, total=False):
    """Options that calls take by position, and those of runs without a clock."""

    workload: Annotated[
        WorkloadChoice,
        Option(
            BUNDLED, "Workload: a plugin with its options, or the path of a file.", REQUESTS
        ),
    ]
    accounting: Annotated[
        Literal["keys", "tokens"] | None,
        Option(
            None,
            "Count blocks by whole keys of the workload, or by tokens.",
            POOL,
            earlier="count",
        ),
    ]
    """None: by tokens under a clock, which knows no other way, and by keys without one."""


CORE: Mapping[str, Option] = {**declared(SourceOptions), **declared(SimulateOptions)}
"""The options of the core, by name."""

MODES: Mapping[str, Mode] = {
    "simulate": Mode(),
    "compare": Mode(defaults={"tensor_parallel": 1}),
}
"""The modes of the core: served in the time of a latency model; replayed without a clock.

Of `compare` the core makes the parts alone. Who replays gives their cache one request after the
other.
"""


def known_modes() -> Mapping[str, Mode]:
    """Return all modes by name: those of the core, and those that packages add."""
    modes, _ = _known(installed())
    return modes


def find_mode(name: str) -> Mode:
    """Return a mode by its name.

    Raises:
        InputError: there is no such mode; names those that there are.
        PluginError: the same, where a package that may add it is broken or outdated.
    """
    mode = (MODES.get(name) or known_modes().get(name)) if isinstance(name, str) else None
    if mode is None:
        known = [name for name, mode in known_modes().items() if not mode.chosen_by]
        msg = f"mode: {shown(name)} is not one of {', '.join(map(repr, known))}"
        raise installed().not_found("kvcore_modes", msg)  # noqa: EM101 - a hook
    return mode


def find_option(name: str) -> Option | None:
    """Return an option by its name; None if there is none. Packages are asked if need be."""
    return CORE.get(name) or _known(installed())[1].get(name)


def option_named(name: str) -> Option:
    """Return an option by its name.

    Raises:
        InputError: there is none: names the nearest one, and all that there are.
        PluginError: the same, where a package that may declare it is broken or outdated.
    """
    option = find_option(name)
    if option is None:
        raise _unknown(name, option_names())
    return option


def option_names() -> list[str]:
    """Return the names of all options, those of the core first."""
    return list(_known(installed())[1])


def mode_options(mode: Mode) -> dict[str, Option]:
    """Return the options that a mode adds to those of the core, by name."""
    options = declared(imported_place(mode.options)) if mode.options else {}
    return {name: option for name, option in options.items() if name not in CORE}


def option_default(name: str, mode: str = "simulate") -> Any:
    """Return the default of an option in a mode."""
    option, defaults = option_named(name), find_mode(mode).defaults
    return defaults.get(name, option.default)


def read_option(name: str, value: Any) -> Any:
    """Return a value as the option `name` has it.

    Raises:
        InputError: a value that the option cannot have; begins with the option's name.
    """
    return option_named(name).read(value)


@cache
def earlier_names() -> Mapping[str, str]:
    """Return the present names of options by their names in earlier releases."""
    return {option.earlier: name for name, option in CORE.items() if option.earlier}


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their present names, with a FutureWarning for each earlier one.

    Choices of rules, which were options of their own, become options of `like`.

    Raises:
        InputError: an option is given under both names.
    """
    present = earlier_names()
    if former := {name: options[name] for name in CHOICES if name in options}:
        like = _chosen(options.get("like"), former)
        text = f"like={str(like)!r}, or --like {like}"
        text = text if isinstance(like, Spec) else f"like={like!r}"
        warnings.warn(
            f"{', '.join(former)}: options of the rules of an engine now: write {text}",
            FutureWarning,
            stacklevel=4,
        )
        options = {name: value for name, value in options.items() if name not in former}
        options["like"] = like
    for old in options.keys() & present.keys():
        new = present[old]
        if new in options:
            msg = f"{old!r} is the earlier name of {new!r}: give one of them"
            raise InputError(msg)
        warnings.warn(
            f"option {old!r} is called {new!r} now; use that", FutureWarning, stacklevel=4
        )
    return {present.get(name, name): value for name, value in options.items()}


def _chosen(like: Any, choices: Mapping[str, Any]) -> Any:
    """Return rules with other values of some options."""
    like = read_option("like", like) or Spec(Rules.name)
    if isinstance(like, Spec):
        texts = {name: as_text(value) for name, value in choices.items()}
        return Spec(like.name, like.options | texts)
    return with_choices(resolve("rules", like), choices)


def check_names(
    names: Iterable[str], known: Collection[str], complaint: str = "there is no option"
) -> None:
    """Refuse a name that is not one of `known`, with a complaint that ends before the name.

    Raises:
        InputError: names the nearest one, and all that there are.
        PluginError: the same, where a package that may declare it is broken or outdated.
    """
    for name in names:
        if name not in known:
            raise _unknown(name, known, complaint)


def _unknown(
    name: str, known: Collection[str], complaint: str = "there is no option"
) -> KvcoreError:
    listed = ", ".join(sorted(known))
    msg = f"{complaint} {name!r}{nearest(name, known)}. There are: {listed}"
    return installed().not_found("kvcore_modes", msg)


@lru_cache(maxsize=1)
def _known(plugins: Plugins) -> tuple[Mapping[str, Mode], Mapping[str, Option]]:
    """Return all modes and all options by name: those of the core, and of these plugins."""
    modes, options = dict(MODES), dict(CORE)
    for name, mode in plugins.modes(MODES).items():
        try:
            options |= mode_options(mode)
        except FAILURES as error:
            plugins.refuse_mode(name, error)
        else:
            modes[name] = mode
    return modes, options
