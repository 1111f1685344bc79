"""The form of a sum of products that joins the softmax that it reads, and the sum of products that this is the softmax of: attention.

All regions between the two products join, if nothing else reads what they store. A map of the queries alone (their scale) joins as well: a block
reads each of its queries once, so that the map is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tilewright.graph.attention import attention, attention_steps
from tilewright.graph.inline import buffers, inline_step, too_long
from tilewright.ir.computation import Step


class Joinable(Protocol):
    """What is asked of a region that may join: its kind and its steps."""

    @property
    def kind(self) -> str: ...

    @property
    def steps(self) -> tuple[Step, ...]: ...


ReadWithin = Callable[[str, Sequence[str]], bool]
"""Whether a value is read by nothing but the product and the regions that store the given values."""


@dataclass(frozen=True)
class WithSoftmax:
    """The steps of a region of kind attention. `values`: what the regions that joined would have stored, in the order of execution."""

    steps: tuple[Step, ...]
    values: tuple[str, ...]


def with_softmax(product: Step, name: str, regions: Mapping[str, Joinable], read_within: ReadWithin) -> WithSoftmax | str | None:
    """Attention that ends with the sum of products `product`, one of whose factors is the value `name`. `regions` are those before it, by the values
    that they store. None if `name` is no softmax of a sum of products, or is read elsewhere too; or why it is one and this form is not possible."""
    between = _behind(name, (), regions, read_within)
    steps = attention_steps(product, {step.name: step for value in between for step in regions[value].steps})
    if steps is None or isinstance(steps, str):
        return steps
    queries = tuple(value for value in buffers(steps[:1]) if _maps_queries(value, steps, between, regions, read_within))
    first = inline_step(steps[0], {value: regions[value].steps[0] for value in queries})
    return WithSoftmax((first, *steps[1:]), (*queries, *between))


def _behind(name: str, readers: tuple[str, ...], regions: Mapping[str, Joinable], read_within: ReadWithin) -> tuple[str, ...]:
    """The values from a sum of products to `name`, in order, if nothing but the product, `readers` and one another read them; otherwise none."""
    host = regions.get(name)
    if host is None or host.kind not in ("map", "row reduction", "contraction") or not read_within(name, readers):
        return ()
    if host.kind == "contraction":
        return (name,)
    behind = (_behind(buffer, (*readers, name), regions, read_within) for buffer in buffers(host.steps) if buffer in regions)
    found = next((values for values in behind if values), ())
    return (*found, name) if found else ()


def _maps_queries(name: str, steps: tuple[Step, ...], between: Sequence[str], regions: Mapping[str, Joinable], read_within: ReadWithin) -> bool:
    """Whether the value is stored by a map and read by nothing but the first factor of the scores."""
    host, found = regions.get(name), attention(steps)
    if host is None or found is None or host.kind != "map" or not host.steps[0].identity_index or not read_within(name, between):
        return False
    elsewhere = (*steps[1:], replace(steps[0], bodies=(found.k,)))
    return name not in buffers(elsewhere) and not too_long(steps, host.steps)
