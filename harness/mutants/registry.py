"""All mutants by name, and the rows of the fault corpus that they cover.

The corpus is a list of public defect reports of sparse attention kernels and of the engines around them; a row is
known by its number, and the family by the part of the system or the mechanism that failed.
"""

from __future__ import annotations

from harness.mutants.attention_mutants import ATTENTION_MUTANTS
from harness.mutants.builder_mutants import BUILDER_MUTANTS
from harness.mutants.call_mutants import CALL_MUTANTS
from harness.mutants.engine_mutants import ENGINE_MUTANTS
from harness.mutants.equivalent_mutants import EQUIVALENT_MUTANTS
from harness.mutants.fa4_mutants import FA4_MUTANTS
from harness.mutants.gather_mutants import GATHER_MUTANTS
from harness.mutants.layer_mutants import LAYER_MUTANTS
from harness.mutants.mask_mod_mutants import MASK_MOD_MUTANTS
from harness.mutants.mask_mutants import MASK_MUTANTS
from harness.mutants.merge_mutants import MERGE_MUTANTS
from harness.mutants.mqa_mutants import MQA_MUTANTS
from harness.mutants.mutant import Mutant
from harness.mutants.plan_mutants import PLAN_MUTANTS

_ALL = (
    *LAYER_MUTANTS,
    *PLAN_MUTANTS,
    *BUILDER_MUTANTS,
    *MASK_MUTANTS,
    *GATHER_MUTANTS,
    *CALL_MUTANTS,
    *MASK_MOD_MUTANTS,
    *ATTENTION_MUTANTS,
    *FA4_MUTANTS,
    *MERGE_MUTANTS,
    *MQA_MUTANTS,
    *ENGINE_MUTANTS,
    *EQUIVALENT_MUTANTS,
)

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in _ALL}
if len(MUTANTS) != len(_ALL):
    raise ValueError("two mutants share a name")

FAULT_ROWS: dict[str, tuple[str, ...]] = {
    "SPARSE": ("B001", "B002", "B078", "B118", "B123", "B142", "B157"),
    "TOPK": ("B007", "B012", "B015", "B016", "B018", "B071", "B072", "B074", "B075", "B077", "B134", "B152"),
    "HANG": ("B009", "B029", "B136"),
    "MERGE-LSE": ("B013", "B041", "B043", "B044", "B045", "B048"),
    "DETERMINISM": ("B017", "B108"),
    "BITMASK": ("B020", "B022", "B116"),
    "MASKMOD": ("B023", "B024", "B026", "B028", "B113", "B114", "B130", "B133"),
    "CACHEKEY": ("B033", "B035", "B128", "B132"),
    "GATHER": ("B034", "B060", "B066", "B068", "B112", "B139", "B149", "B160"),
    "INT32": ("B036", "B057", "B098", "B099", "B100", "B153"),
    "FP8": ("B038", "B080", "B086", "B088", "B089", "B090", "B091"),
    "EMPTY": ("B039", "B040", "B115", "B137", "B144"),
    "CP": ("B050", "B051", "B093", "B094", "B095", "B096", "B154"),
    "HEADDIM": ("B053", "B082", "B084", "B085", "B120", "B140", "B156"),
    "CHUNK": ("B056", "B058", "B061", "B062", "B063", "B065", "B151", "B159"),
    "ASYNC": ("B102", "B103", "B104", "B106", "B107", "B110", "B146"),
    "DTYPE": ("B121", "B129"),
    "INTERP": ("B125", "B126"),
}
"""Family -> rows of the corpus."""

NOT_PLANTED: dict[str, str] = {}
"""Row -> why no mutant carries it."""
