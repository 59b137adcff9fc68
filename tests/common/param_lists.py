"""Lists of parameters for property-based tests."""

from collections.abc import Sequence

from hypothesis import strategies as st

from zero_nb.plan.policies import even
from zero_nb.plan.shards import ShardPlan
from zero_nb.plan.specs import ParamSpec

sizes = st.one_of(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1000, 12_345, 10**7]))
shapes = st.one_of(
    sizes.map(lambda n: (n,)), st.tuples(st.integers(0, 12), st.integers(1, 12)), st.just(())
)
dtypes = st.sampled_from(["float32", "bfloat16", "float64"])


@st.composite
def param_lists(draw, most=24, devices=None):
    rows = draw(
        st.lists(
            st.tuples(
                shapes,
                dtypes,
                st.integers(0, 2),
                st.booleans(),
                st.just("cpu") if devices is None else devices,
            ),
            max_size=most,
        )
    )
    names = draw(st.lists(st.text(max_size=6), min_size=len(rows), max_size=len(rows), unique=True))
    return tuple(
        ParamSpec(name, shape, dtype, device, group, not frozen)
        for name, (shape, dtype, group, frozen, device) in zip(names, rows, strict=True)
    )


def damaged(rng, spans):
    """Lose, repeat, lengthen, shorten or shift one of these tuples, or none."""
    k = rng.randrange(len(spans))
    at, by = rng.randrange(len(spans[k])), rng.randint(-2, 2)
    other = type(spans[k])(*(n + by * (field == at) for field, n in enumerate(spans[k])))
    return [*spans[:k], *rng.choice([[], [spans[k]] * 2, [other], [spans[k]]]), *spans[k + 1 :]]


def by_row(
    specs: Sequence[ParamSpec], world_size: int, *, loads: Sequence[float] | None = None
) -> ShardPlan:
    """Cut the row of all parameters evenly: a policy that `pack` does not know, so it asks for the owners."""
    return even(specs, world_size, loads=loads)
