"""The one mechanism of `readers`: settings are handed out by name, so that at the end nobody's are known too.

Every key that was given ends in one of four places: it was asked for and made a field of the `Reading`, or it is in its
`ignored`, in its `not_the_loss`, or in an error. There is no fifth.
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
    """One call: a function of `gspo_kernels.advantages` or `sampler_mismatch`, "clamp" of a tensor, or "subtract_kl".

    options: its keyword arguments. A text where a tensor belongs says which. "subtract_kl" takes kl_coef times the sum
        over each answer of the estimator (old against reference log-probs) from its reward.
    """

    call: str
    options: dict[str, Any]


class Normalizer(NamedTuple):
    """What to pass as `normalizer`: `times` the number of `of` in `over`.

    of: "rows" (answers, those that are masked entirely too), "sequences" (without those), "tokens" (that count), or
        "one": the number 1.
    over: "micro-batch", this call's; "step", all micro-batches of an optimizer step, or "rollout", of all answers that
        were sampled at once. The last two count on all processes and divide by how many there are, which is right
        where gradients are averaged over processes, as DDP and FSDP do.
    """

    of: str
    over: str
    times: float = 1.0


@dataclass(frozen=True)
class Reading:
    """What a trainer's settings say of the loss. A setting that says something is in a field here or was refused.

    objective: the loss.
    normalizer: what it is divided by, in the trainer.
    kl_normalizer: the same of the KL term, None: `normalizer`.
    temperature: what logits are divided by in the loss, which is not always what was sampled with; None: the settings
        do not say.
    advantages: how rewards become advantages, call by call; None: the settings do not say.
    token_weights: calls whose product is `token_weights`.
    old_log_probs: "trainer": of the policy before the first update of a rollout, as the trainer computes them;
        "rollout": of the engine that sampled; "current": log_probs.detach().
    beside: what else acts on the loss, by the trainer's own names and with its values: takes tokens out of the mask,
        weighs answers or rewards, moves the reference (else the policy before training) or adds a term. To be done by
        whoever wants it.
    ignored: settings of a loss that are on, not by default, and that the trainer, set like this, does not look at. A
        UserWarning names them too.
    not_the_loss: the names of all other settings; on none of them does the loss depend.
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
        reader: for messages.
        settings: a mapping or a dataclass instance.
        of_the_loss: every setting that can touch the loss, and its value where it is not given.
        others: names of settings that do not. (A reader may ask for one all the same.)
        sections: names of nested settings; what is in them is called "section.name".
        more: settings besides, such as a section from elsewhere.

    Raises:
        ValueError: naming every key that is in neither table, and the nearest that is.
        TypeError: `settings` is neither.
    """

    def __init__(
        self,
        reader: str,
        settings: Any,
        of_the_loss: Mapping[str, Any],
        others: Collection[str],
        sections: Collection[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.check = Field(reader)
        self._loss = of_the_loss
        self._defaults = dict(of_the_loss)
        self._given: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._take(settings, sections, "")
        self._take(more or {}, sections, "")
        known = {*of_the_loss, *others}
        unknown = [name for name in self._given if name not in known]
        if unknown:
            near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
            named = ", ".join(repr(k) + (f" (is it {near[k][0]!r}?)" if near[k] else "") for k in unknown)
            expected = "settings must be known to this reader (leave out what does not touch the loss)"
            raise ValueError(f"{reader}: {expected}, got {named}")

    def _take(self, settings: Any, sections: Collection[str], prefix: str) -> None:
        """What is given, and the defaults of dataclasses."""
        if is_dataclass(settings) and not isinstance(settings, type):
            self._defaults |= {prefix + f.name: f.default for f in fields(settings) if f.default is not MISSING}
            settings = {f.name: getattr(settings, f.name) for f in fields(settings)}
        elif not isinstance(settings, Mapping):
            where = prefix.removesuffix(".") or "settings"
            self.check.fail(where, "a mapping or a dataclass instance", settings, TypeError)
        for key in settings:
            name, value = f"{prefix}{key}", settings[key]
            if name in self._given:
                self.check.fail(name, "given once", Said("it twice"))
            elif name not in sections:
                self._given[name] = value
            elif value is not None:
                self._take(value, sections, f"{name}.")

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def get(self, name: str, default: Any = None) -> Any:
        """A value as it came. `default` is for names of `others` only."""
        self._asked.add(name)
        return self._given.get(name, self._loss.get(name, default))

    def number(self, name: str, rule: Rule = ANY, default: float | None = None) -> float:
        value = self.get(name, default)
        return self.check.number(name, as_number(value), *rule)

    def count(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, ("a whole number >= 1", lambda x: x >= 1 and x % 1 == 0), default))

    def optional(self, name: str, rule: Rule = ANY) -> float | None:
        return None if self.get(name) is None else self.number(name, (f"{rule[0]}, or None", rule[1]))

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name, default)
        self.check.boolean(name, value)
        return value

    def choice(self, name: str, table: Mapping[Any, Any]) -> Any:
        """What `table` has for the value."""
        value = self.get(name)
        if not isinstance(value, str | bool | None) or value not in table:
            self.refuse(name, f"one of {', '.join(map(repr, table))} (nothing else is here)")
        return table[value]

    def must(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse any other value."""
        if self.get(name) not in allowed:
            self.refuse(name, f"{' or '.join(map(repr, allowed))} ({why})")

    def refuse(self, name: str, expected: str) -> NoReturn:
        self.check.fail(name, expected, self.get(name))

    def beside(self, *names: str) -> dict[str, Any]:
        """Of these settings of the loss, what is not as if it had not been given."""
        values = {name: self.get(name) for name in names}
        return {name: value for name, value in values.items() if value not in (None, [], self._loss[name])}

    def reading(self, fields: Mapping[str, Any], normalizer: Normalizer, luspo: bool = False, **more: Any) -> Reading:
        """The end: the objective of `fields`, and what nobody asked for."""
        try:
            objective = Objective.preset("luspo" if luspo else "gspo", **fields)  # luspo: no warning that it is LUSPO
        except ValueError as error:
            raise ValueError(f"{self.check.place}: these settings make no Objective ({error})") from error
        rest = [name for name in self._given if name not in self._asked]
        off = {name: (None, False, 0, self._defaults[name]) for name in rest if name in self._loss}
        ignored = {name: self._given[name] for name in off if self._given[name] not in off[name]}
        if ignored:
            named = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
            warnings.warn(f"{self.check.place}: the trainer, set like this, does not look at {named}", stacklevel=3)
        others = tuple(name for name in rest if name not in ignored)
        return Reading(objective, normalizer, ignored=ignored, not_the_loss=others, **more)


def as_number(value: Any) -> Any:
    """A text that is a number as one: flags are texts, and YAML reads 1e-6 as one."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def from_flags(check: Field, arguments: Sequence[Any]) -> dict[str, Any]:
    """["--beta", "0", "--use_vllm", "true", ...] as settings: numbers and truth values as such, several as a list."""
    settings: dict[str, list[Any]] = {}
    values: list[Any] | None = None
    for text in arguments:
        if isinstance(text, str) and text.startswith("--"):
            name, given, value = text[2:].partition("=")
            name = name.replace("-", "_")
            if name in settings:
                check.fail(f"--{name}", "given once", Said("it twice"))
            values = settings[name] = [value] if given else []
        elif not isinstance(text, str) or values is None:
            check.fail("arguments", "flags that begin with --, each followed by its values", text)
        else:
            values.append(text)
    words = {"true": True, "false": False}
    plain = {name: [words.get(v.lower(), as_number(v)) for v in given] for name, given in settings.items()}
    return {name: given[0] if len(given) == 1 else given or True for name, given in plain.items()}
