"""`Keys` gives a reader access to settings by name. `Reading` is the result of a reader."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, NoReturn

from gspo_kernels import Objective
from gspo_kernels.validation import Checks

Rule = tuple[str, Callable[[float], bool]]
NOT_NEGATIVE: Rule = ("a number >= 0", lambda x: x >= 0)
POSITIVE: Rule = ("a number > 0", lambda x: x > 0)


class Step(NamedTuple):
    """One call in the computation of advantages.

    Attributes:
        call: the name of a function of `gspo_kernels.advantages`; "clamp" for torch.clamp; or "subtract_kl": subtract
            kl_coef times the KL of an answer from the answer's reward. This KL is a sum over the answer's tokens:
            kl_estimator of old minus reference log-prob.
        options: the keyword arguments. For a tensor argument, a string describes which tensor to pass.
    """

    call: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """The loss that a trainer's settings describe.

    Attributes:
        objective: the loss.
        normalizer: what to count in all micro-batches of an optimizer step: "rows" (all answers, including entirely
            masked ones), "sequences" (answers with an unmasked token), "tokens" (unmasked tokens) or "one" (the count
            is 1). Pass the count over all processes, divided by the number of processes, as `normalizer`. This assumes
            that gradients are averaged over processes, as DDP and FSDP do.
        temperature: the divisor of the logits in the loss, which may differ from the sampling temperature.
        advantages: the calls that turn rewards into advantages, in order.
        old_log_probs: "trainer" (the trainer computes them with the policy before the first update of a rollout) or
            "rollout" (the sampling engine computes them).
        beside: other settings that act on the loss, with the trainer's names and values. They mask tokens, weight
            answers or change rewards. The caller must apply them.
    """

    objective: Objective
    normalizer: str
    temperature: float
    advantages: tuple[Step, ...]
    old_log_probs: str = "trainer"
    beside: dict[str, Any] = field(default_factory=dict)


class Keys:
    """The settings of one trainer, for one reader.

    Args:
        reader: the name of the reader, for messages.
        settings: a mapping or a dataclass instance.
        loss_defaults: all settings that can change the loss, with their defaults.
        other_names: all settings that cannot change the loss. (A reader may still read such a setting.)
        sections: names of nested settings. A setting inside is called "section.name".

    Raises:
        ValueError: a setting is in neither table. The message names all such settings and the most similar known names.
        TypeError: `settings` is neither a mapping nor a dataclass instance.
    """

    def __init__(
        self,
        reader: str,
        settings: Any,
        loss_defaults: Mapping[str, Any],
        other_names: Collection[str],
        sections: Collection[str] = (),
    ) -> None:
        self.check = Checks(reader)
        self._loss_defaults = loss_defaults
        self._values: dict[str, Any] = {}
        self._add(settings, sections, "")
        known = {*loss_defaults, *other_names}
        unknown = [name for name in self._values if name not in known]
        if unknown:
            similar = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
            listed = ", ".join(repr(k) + (f" (is it {similar[k][0]!r}?)" if similar[k] else "") for k in unknown)
            expected = "settings must be known to this reader (leave out those that do not change the loss)"
            raise ValueError(f"{reader}: {expected}, got {listed}")

    def _add(self, settings: Any, sections: Collection[str], prefix: str) -> None:
        """Add the values of `settings` and their sections."""
        if is_dataclass(settings) and not isinstance(settings, type):
            settings = {f.name: getattr(settings, f.name) for f in fields(settings)}
        elif not isinstance(settings, Mapping):
            where = prefix.removesuffix(".") or "settings"
            self.check.fail(where, "a mapping or a dataclass instance", settings, TypeError)
        for key in settings:
            name, value = f"{prefix}{key}", settings[key]
            if name not in sections:
                self._values[name] = value
            elif value is not None:
                self._add(value, sections, f"{name}.")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Read a value without checking it. Only settings of `other_names` need `default`; the others have one."""
        return self._values.get(name, self._loss_defaults.get(name, default))

    def number(self, name: str, rule: Rule, default: float | None = None) -> float:
        """Read a number, parsing a string if necessary. Refuse anything else, and numbers that break the rule."""
        value = self.get(name, default)
        return self.check.number(name, as_number(value), *rule)

    def count(self, name: str, default: int | None = None) -> int:
        """Read a whole number >= 1."""
        return int(self.number(name, ("a whole number >= 1", lambda x: x >= 1 and x % 1 == 0), default))

    def optional(self, name: str, rule: Rule) -> float | None:
        """Read a number or None."""
        return None if self.get(name) is None else self.number(name, (f"{rule[0]}, or None", rule[1]))

    def flag(self, name: str) -> bool:
        """Read True or False."""
        value = self.get(name)
        self.check.boolean(name, value)
        return value

    def choice(self, name: str, table: Mapping[Any, Any]) -> Any:
        """Look the value up in `table`. Refuse a value that is not in the table."""
        value = self.get(name)
        if not isinstance(value, str | bool | None) or value not in table:
            self.refuse(name, f"one of {', '.join(map(repr, table))} (other values are not supported)")
        return table[value]

    def must(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse the value unless it is one of `allowed`. `why` explains the restriction in the message."""
        if self.get(name) not in allowed:
            self.refuse(name, f"{' or '.join(map(repr, allowed))} ({why})")

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise a ValueError that names the setting, what was expected and its value."""
        self.check.fail(name, expected, self.get(name))

    def beside(self, *names: str) -> dict[str, Any]:
        """The settings among `names` whose value is neither empty nor the default, for `Reading.beside`."""
        values = {name: self.get(name) for name in names}
        return {name: value for name, value in values.items() if value not in (None, [], self._loss_defaults[name])}

    def reading(self, fields: Mapping[str, Any], normalizer: str, **others: Any) -> Reading:
        """Make the Reading from an Objective's `fields`.

        Args:
            others: the other fields of the Reading.

        Raises:
            ValueError: `fields` are not valid for an Objective.
        """
        try:
            objective = Objective(**fields)
        except ValueError as error:
            raise ValueError(f"{self.check.place}: no Objective has these settings ({error})") from error
        return Reading(objective, normalizer, **others)


def as_number(value: Any) -> Any:
    """Parse a number in a string; return any other value unchanged. In YAML, 1e-6 is a string."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
