"""`Keys`, through which a reader reads settings by name, and `Reading`, its result.

`Keys` records which settings were read, so that each one ends in exactly one place: a field of the `Reading`, its
`ignored`, its `not_the_loss`, or an error.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, NoReturn

from gspo_kernels import Objective
from gspo_kernels.validation import Field, Said

Rule = tuple[str, Callable[[float], bool]]
ANY: Rule = ("a number", lambda x: x == x)
NOT_NEGATIVE: Rule = ("a number >= 0", lambda x: x >= 0)
POSITIVE: Rule = ("a number > 0", lambda x: x > 0)
ABOVE_ONE: Rule = ("a number > 1", lambda x: x > 1)


class Step(NamedTuple):
    """One call on the way from rewards to advantages, or to token weights.

    call: a function of `gspo_kernels.advantages` or `gspo_kernels.sampler_mismatch`; "clamp", of a tensor; or
        "subtract_kl", which subtracts kl_coef times an answer's KL from its reward. That KL is the sum of kl_estimator,
        old against reference log-probs, over the answer's tokens.
    options: the keyword arguments. Where an argument is a tensor, a text says which one to pass.
    """

    call: str
    options: dict[str, Any]


class Normalizer(NamedTuple):
    """What to pass as `normalizer`: `times` the number of `of` in `over`.

    of: "rows": all answers, also entirely masked ones; "sequences": answers with an unmasked token; "tokens": unmasked
        tokens; or "one": the number 1.
    over: "micro-batch": of this call; "step": of all micro-batches of an optimizer step; "rollout": of all answers that
        were sampled at once. The last two count over all processes and divide by the number of processes, which is
        right where gradients are averaged over processes, as by DDP and FSDP.
    """

    of: str
    over: str
    times: float = 1.0


@dataclass(frozen=True)
class Reading:
    """What a trainer's settings say about its loss. Every setting that changes the loss is in a field, or was refused.

    objective: the loss.
    normalizer: what the trainer divides it by.
    kl_normalizer: what the trainer divides the KL term by; None: `normalizer`.
    temperature: what the loss divides logits by, which may differ from the sampling temperature; None: the settings do
        not say.
    advantages: how rewards become advantages, call by call; None: the settings do not say.
    token_weights: calls whose product is `token_weights`.
    old_log_probs: "trainer": of the policy before the first update of a rollout, as the trainer computes them;
        "rollout": of the engine that sampled; "current": log_probs.detach().
    beside: settings that also act on the loss, with the trainer's names and values: they mask tokens, weight answers or
        rewards, move the reference (otherwise the policy before training) or add a term. The caller has to apply them.
    ignored: settings of the loss with other values than their defaults that the trainer, with these settings, does not
        read. A UserWarning names them too.
    not_the_loss: the names of all other settings. The loss depends on none of them.
    """

    objective: Objective
    normalizer: Normalizer
    kl_normalizer: Normalizer | None = None
    temperature: float | None = None
    advantages: tuple[Step, ...] | None = None
    token_weights: tuple[Step, ...] = ()
    old_log_probs: str = "trainer"
    beside: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, Any] = field(default_factory=dict)
    not_the_loss: tuple[str, ...] = ()


class Keys:
    """The settings of one trainer, for one reader.

    Args:
        reader: the name of the reader, for messages.
        settings: a mapping or a dataclass instance.
        loss_defaults: every setting that can change the loss, with its default.
        other_names: the settings that cannot. (A reader may still read one.)
        sections: names of nested settings; a setting in one is called "section.name".
        more: further settings, such as a section from elsewhere.

    Raises:
        ValueError: naming every setting that neither table has, and the nearest name that one has.
        TypeError: `settings` is neither a mapping nor a dataclass instance.
    """

    def __init__(
        self,
        reader: str,
        settings: Any,
        loss_defaults: Mapping[str, Any],
        other_names: Collection[str],
        sections: Collection[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.check = Field(reader)
        self._loss_defaults = loss_defaults
        self._defaults = dict(loss_defaults)  # with those of dataclasses
        self._values: dict[str, Any] = {}
        self._read: set[str] = set()
        self._add(settings, sections, "")
        self._add(more or {}, sections, "")
        known = {*loss_defaults, *other_names}
        unknown = [name for name in self._values if name not in known]
        if unknown:
            near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
            listed = ", ".join(repr(k) + (f" (is it {near[k][0]!r}?)" if near[k] else "") for k in unknown)
            expected = "settings must be known to this reader (leave out what does not touch the loss)"
            raise ValueError(f"{reader}: {expected}, got {listed}")

    def _add(self, settings: Any, sections: Collection[str], prefix: str) -> None:
        """Add the values of `settings`, and of their sections, and the defaults of dataclasses."""
        if is_dataclass(settings) and not isinstance(settings, type):
            self._defaults |= {prefix + f.name: f.default for f in fields(settings) if f.default is not MISSING}
            settings = {f.name: getattr(settings, f.name) for f in fields(settings)}
        elif not isinstance(settings, Mapping):
            where = prefix.removesuffix(".") or "settings"
            self.check.fail(where, "a mapping or a dataclass instance", settings, TypeError)
        for key in settings:
            name, value = f"{prefix}{key}", settings[key]
            if name in self._values:
                self.check.fail(name, "given once", Said("it twice"))
            elif name not in sections:
                self._values[name] = value
            elif value is not None:
                self._add(value, sections, f"{name}.")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value unchecked. Only names of `other_names` take a `default`."""
        self._read.add(name)
        return self._values.get(name, self._loss_defaults.get(name, default))

    def number(self, name: str, rule: Rule = ANY, default: float | None = None) -> float:
        """Return a number, or the number that a text says; refuse others, and those that break the rule."""
        value = self.get(name, default)
        return self.check.number(name, as_number(value), *rule)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number >= 1."""
        return int(self.number(name, ("a whole number >= 1", lambda x: x >= 1 and x % 1 == 0), default))

    def optional(self, name: str, rule: Rule = ANY) -> float | None:
        """Return a number, or None."""
        return None if self.get(name) is None else self.number(name, (f"{rule[0]}, or None", rule[1]))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return True or False."""
        value = self.get(name, default)
        self.check.boolean(name, value)
        return value

    def choice(self, name: str, table: Mapping[Any, Any]) -> Any:
        """Return the table's entry for the value; refuse a value without one."""
        value = self.get(name)
        if not isinstance(value, str | bool | None) or value not in table:
            self.refuse(name, f"one of {', '.join(map(repr, table))} (nothing else is supported)")
        return table[value]

    def must(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse values that are not allowed."""
        if self.get(name) not in allowed:
            self.refuse(name, f"{' or '.join(map(repr, allowed))} ({why})")

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise a ValueError that names the setting, what was expected and its value."""
        self.check.fail(name, expected, self.get(name))

    def beside(self, *names: str) -> dict[str, Any]:
        """Return those of these settings that are neither empty nor at their default, for `Reading.beside`."""
        values = {name: self.get(name) for name in names}
        return {name: value for name, value in values.items() if value not in (None, [], self._loss_defaults[name])}

    def reading(self, fields: Mapping[str, Any], normalizer: Normalizer, luspo: bool = False, **more: Any) -> Reading:
        """Return the Reading of an Objective's `fields`, and sort the settings that were not read.

        Args:
            luspo: `fields` are LUSPO's, of which the Objective need not warn.
            more: further fields of the Reading.

        Raises:
            ValueError: no Objective has these fields.
        """
        try:
            objective = Objective.preset("luspo" if luspo else "gspo", **fields)
        except ValueError as error:
            raise ValueError(f"{self.check.place}: these settings make no Objective ({error})") from error
        unread = [name for name in self._values if name not in self._read]
        off = {name: (None, False, 0, self._defaults[name]) for name in unread if name in self._loss_defaults}
        ignored = {name: self._values[name] for name in off if self._values[name] not in off[name]}
        if ignored:
            listed = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
            warnings.warn(f"{self.check.place}: the trainer, set like this, does not look at {listed}", stacklevel=3)
        not_the_loss = tuple(name for name in unread if name not in ignored)
        return Reading(objective, normalizer, ignored=ignored, not_the_loss=not_the_loss, **more)


def as_number(value: Any) -> Any:
    """Return the number in a text; return anything else unchanged. Flags are texts, and YAML reads 1e-6 as a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def from_flags(check: Field, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return flags such as ["--beta", "0", "--use_vllm", "true"] as settings, with numbers and truth values.

    A flag with several values has a list; one without a value is True.
    """
    settings: dict[str, list[Any]] = {}
    values: list[Any] | None = None
    for text in arguments:
        if isinstance(text, str) and text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            name = name.replace("-", "_")
            if name in settings:
                check.fail(f"--{name}", "given once", Said("it twice"))
            values = settings[name] = [value] if equals else []
        elif not isinstance(text, str) or values is None:
            check.fail("arguments", "flags that begin with --, each followed by its values", text)
        else:
            values.append(text)
    words = {"true": True, "false": False}
    parsed = {name: [words.get(v.lower(), as_number(v)) for v in texts] for name, texts in settings.items()}
    return {name: values[0] if len(values) == 1 else values or True for name, values in parsed.items()}
