"""The rules in a quantised checkpoint's config that assign bits and scale blocks to matrices."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from cluster.arch.keys import ConfigKeys

# AutoRound treats a name with one of these characters as a regular expression
PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one matrix is quantised, by the config. A field is None if the config does not say.

    `bits` is the size of a code. `block` is how many outputs and how many inputs share a scale; 0 means all. So (0, 0)
    is one scale for the matrix, (1, 0) one per output, (1, g) one per group of g inputs of an output. `said` quotes the
    config for messages, such as "group_size is 128".
    """

    bits: int | None = None
    block: tuple[int, int] | None = None
    said: str = ""


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """The `scheme` of modules for whose name `fits` returns a true value."""

    fits: Callable[[str], object]
    scheme: Scheme


def gptq_rules(dynamic: ConfigKeys, common: Scheme) -> tuple[SchemeRule, ...]:
    """Return the rules of GPTQ's `dynamic`, in order. A key is a pattern for the beginning of a module's name. A key
    with the prefix "+:", or with none, gives values for the modules that match; modules that match a key with the
    prefix "-:" are not quantised.

    Raises:
        ConfigError: a pattern is not a regular expression, or a value has the wrong type.
    """
    rules = []
    for key in dynamic.data:
        pattern = _compiled(dynamic, "dynamic", key.removeprefix("-:").removeprefix("+:"))
        own = Scheme() if key.startswith("-:") else _over(common, dynamic.section(key), f"dynamic.{key}.")
        rules.append(SchemeRule(pattern.match, own))
    return tuple(rules)


def auto_round_rules(extra: ConfigKeys, common: Scheme) -> tuple[SchemeRule, ...]:
    """Return the rules of AutoRound's `extra_config`: exact module names first, then patterns searched in names.

    Raises:
        ConfigError: as `gptq_rules`.
    """
    exact, searched = [], []
    for key in extra.data:
        scheme = _over(common, extra.section(key), f"extra_config.{key}.")
        exact.append(SchemeRule(key.__eq__, scheme))
        if PATTERN.search(key):
            searched.append(SchemeRule(_compiled(extra, "extra_config", key).search, scheme))
    return (*exact, *searched)


def compressed_rules(groups: ConfigKeys) -> tuple[Scheme, tuple[SchemeRule, ...]]:
    """Return compressed-tensors' `config_groups` as a default scheme and rules: exact names first, then patterns
    ("re:"). The default, for modules that no rule fits, is the scheme of the first group without targets or with the
    target "Linear".

    Raises:
        ConfigError: as `gptq_rules`.
    """
    rest, exact, matched = Scheme(), list[SchemeRule](), list[SchemeRule]()
    # In reverse, so that the first group ends up first in each list and last to set `rest`.
    for name in reversed(list(groups.data)):
        group = groups.section(name)
        scheme = _compressed(group.section("weights"), f"config_groups.{name}.weights.")
        targets = group.data.get("targets") or []
        if not isinstance(targets, list) or any(not isinstance(target, str) for target in targets):
            raise groups.error(f"config_groups.{name}.targets must be a list of names, got {targets!r}")
        if not targets or "Linear" in targets:
            rest = scheme
        patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
        matched[:0] = [SchemeRule(_compiled(groups, f"{name}.targets", pattern).match, scheme) for pattern in patterns]
        exact[:0] = [SchemeRule(target.__eq__, scheme) for target in targets]
    return rest, (*exact, *matched)


def _compressed(weights: ConfigKeys, field: str) -> Scheme:
    """Return the scheme of one group's `weights`; an unknown strategy gives no block."""
    bits = weights.integer("num_bits") if weights.data.get("num_bits") is not None else None
    strategy, size = weights.data.get("strategy"), weights.data.get("group_size")
    said = f"{field}strategy is {strategy}"
    if strategy == "block":
        given = weights.data.get("block_structure")
        lengths = [int(n) for n in re.findall(r"\d+", str(given))]
        if len(lengths) != 2 or min(lengths) < 1:
            raise weights.error(
                f"{field}block_structure must be two positive integers, outputs and inputs, got {given!r}"
            )
        return Scheme(bits, (lengths[0], lengths[1]), f"{field}block_structure is {lengths}")
    if strategy in ("group", None) and size not in (None, -1):
        return Scheme(bits, (1, weights.integer("group_size")), f"{field}group_size is {size}")
    if strategy in ("channel", "group") or size == -1:
        return Scheme(bits, (1, 0), said if strategy else f"{field}group_size is -1")
    return Scheme(bits, (0, 0), said) if strategy == "tensor" else Scheme(bits)


def _over(common: Scheme, own: ConfigKeys, field: str) -> Scheme:
    """Return `common` with the `bits` and `group_size` of a rule's `own` values."""
    bits = own.integer("bits") if own.data.get("bits") is not None else common.bits
    if (size := own.data.get("group_size")) is None:
        return Scheme(bits, common.block, common.said)
    inputs = 0 if size == -1 else own.integer("group_size")
    return Scheme(bits, (1, inputs), f"{field}group_size is {size}")


def _compiled(keys: ConfigKeys, field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise keys.error(f"{field} {pattern!r} is no regular expression: {error}") from None
