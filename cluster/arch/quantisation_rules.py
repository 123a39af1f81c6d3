"""The rules in a quantised checkpoint's config that assign bits and scale blocks to matrices."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from cluster.arch.keys import ConfigKeys

# AutoRound treats a name with one of these characters as a regular expression
REGEX_CHARACTERS = re.compile(r"[*+?^$()\[\]{}|\\]")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one matrix is quantised, by the config. A field is None if the config does not say.

    `bits` is the size of a code. `block` is how many outputs and how many inputs share a scale; 0 means all. For
    example, (0, 0) means one scale for the matrix, (1, 0) one per output, and (1, g) one per g inputs of an output.
    `config_quote` quotes the config for messages, such as "group_size is 128".
    """

    bits: int | None = None
    block: tuple[int, int] | None = None
    config_quote: str = ""


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """The `scheme` of modules for whose name `matches` returns a true value."""

    matches: Callable[[str], object]
    scheme: Scheme


def gptq_rules(dynamic: ConfigKeys, default_scheme: Scheme) -> tuple[SchemeRule, ...]:
    """Return the rules of GPTQ's `dynamic`, in order. A key is a pattern for the beginning of a module's name. A key
    with the prefix "+:", or with none, gives values for the modules that match; modules that match a key with the
    prefix "-:" are not quantised.

    Raises:
        ConfigError: a pattern is not a regular expression, or a value has the wrong type.
    """
    rules = []
    for key in dynamic.data:
        pattern = _compile_pattern(dynamic, "dynamic", key.removeprefix("-:").removeprefix("+:"))
        scheme = (
            Scheme()
            if key.startswith("-:")
            else _overridden_scheme(default_scheme, dynamic.section(key), f"dynamic.{key}.")
        )
        rules.append(SchemeRule(pattern.match, scheme))
    return tuple(rules)


def auto_round_rules(extra: ConfigKeys, default_scheme: Scheme) -> tuple[SchemeRule, ...]:
    """Return the rules of AutoRound's `extra_config`: first those for exact module names, then those for patterns that
    are searched in names.

    Raises:
        ConfigError: as `gptq_rules`.
    """
    exact_rules, pattern_rules = [], []
    for key in extra.data:
        scheme = _overridden_scheme(default_scheme, extra.section(key), f"extra_config.{key}.")
        exact_rules.append(SchemeRule(key.__eq__, scheme))
        if REGEX_CHARACTERS.search(key):
            pattern_rules.append(SchemeRule(_compile_pattern(extra, "extra_config", key).search, scheme))
    return (*exact_rules, *pattern_rules)


def compressed_rules(groups: ConfigKeys) -> tuple[Scheme, tuple[SchemeRule, ...]]:
    """Return compressed-tensors' `config_groups` as a default scheme and rules: first the rules for exact names, then
    those for patterns ("re:"). The default, for modules that no rule matches, is the scheme of the first group without
    targets or with the target "Linear".

    Raises:
        ConfigError: as `gptq_rules`.
    """
    default_scheme, exact_rules, pattern_rules = Scheme(), list[SchemeRule](), list[SchemeRule]()
    # The loop goes through the groups in reverse. So the rules of the first group come first in each list, and of the
    # groups that set `default_scheme`, the first one sets it last.
    for name in reversed(list(groups.data)):
        group = groups.section(name)
        scheme = _weights_scheme(group.section("weights"), f"config_groups.{name}.weights.")
        targets = group.data.get("targets") or []
        if not isinstance(targets, list) or any(not isinstance(target, str) for target in targets):
            raise groups.error(f"config_groups.{name}.targets must be a list of names, got {targets!r}")
        if not targets or "Linear" in targets:
            default_scheme = scheme
        patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
        pattern_rules[:0] = [
            SchemeRule(_compile_pattern(groups, f"{name}.targets", pattern).match, scheme) for pattern in patterns
        ]
        exact_rules[:0] = [SchemeRule(target.__eq__, scheme) for target in targets]
    return default_scheme, (*exact_rules, *pattern_rules)


def _weights_scheme(weights: ConfigKeys, field: str) -> Scheme:
    """Return the scheme of one group's `weights`; for an unknown strategy, its `block` is None."""
    bits = weights.integer("num_bits") if weights.data.get("num_bits") is not None else None
    strategy, group_size = weights.data.get("strategy"), weights.data.get("group_size")
    strategy_quote = f"{field}strategy is {strategy}"
    if strategy == "block":
        block_structure = weights.data.get("block_structure")
        lengths = [int(n) for n in re.findall(r"\d+", str(block_structure))]
        if len(lengths) != 2 or min(lengths) < 1:
            raise weights.error(
                f"{field}block_structure must be two positive integers, outputs and inputs, got {block_structure!r}"
            )
        return Scheme(bits, (lengths[0], lengths[1]), f"{field}block_structure is {lengths}")
    if strategy in ("group", None) and group_size not in (None, -1):
        return Scheme(bits, (1, weights.integer("group_size")), f"{field}group_size is {group_size}")
    if strategy in ("channel", "group") or group_size == -1:
        return Scheme(bits, (1, 0), strategy_quote if strategy else f"{field}group_size is -1")
    return Scheme(bits, (0, 0), strategy_quote) if strategy == "tensor" else Scheme(bits)


def _overridden_scheme(default_scheme: Scheme, rule_section: ConfigKeys, field: str) -> Scheme:
    """Return `default_scheme` with the `bits` and `group_size` that `rule_section` sets."""
    bits = rule_section.integer("bits") if rule_section.data.get("bits") is not None else default_scheme.bits
    if (group_size := rule_section.data.get("group_size")) is None:
        return Scheme(bits, default_scheme.block, default_scheme.config_quote)
    inputs = 0 if group_size == -1 else rule_section.integer("group_size")
    return Scheme(bits, (1, inputs), f"{field}group_size is {group_size}")


def _compile_pattern(keys: ConfigKeys, field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise keys.error(f"{field} {pattern!r} is no regular expression: {error}") from None
