"""Cases for the programs' fuzzer: programs with up to four things wrong with them."""

from __future__ import annotations

from fuzz.chained import Program
from fuzz.choosers import Chooser, DrawnChooser
from fuzz.faults import FAULTS
from fuzz.runner import Case
from hypothesis import strategies as st


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases as ``make_case`` makes them."""
    return make_case(DrawnChooser(draw))


def make_case(choose: Chooser) -> Case:
    """Return a case: one to six nodes, of which later ones often read what earlier ones wrote, and 0 to 4 faults."""
    program = Program(choose)
    for _ in range(choose.pick((1, 1, 2, 2, 3, 4, 5, 6))):
        program.add_node()
    program.arrange()
    for _ in range(choose.pick((0, 1, 1, 1, 2, 2, 3, 4))):
        choose.pick(FAULTS)(program)
    return program.case()
