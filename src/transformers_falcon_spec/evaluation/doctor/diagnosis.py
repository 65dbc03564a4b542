"""The doctor's examination of a pair, from its configuration to the speed of its texts."""

from .findings import TEMPLATE_MASK, Report
from .measurement import Case, Measurement, measured_fault
from .setup_checks import check_contract, check_template, check_tree_reading


def diagnose(case: Case, report: Report) -> None:
    """Fill the report; a fault that makes drafting impossible ends the examination before any text is written.

    Raises:
        [`BenchmarkError`]: a text could not be written.
    """
    report.sections["contract"], contract_faults, fits = check_contract(case.drafter, case.target, case.tokenizer)
    report.sections["reading"], reading_faults, can_verify = check_tree_reading(case.target)
    report.sections["template"], template_faults = check_template(case.tokenizer)
    report.findings += contract_faults + reading_faults + template_faults
    if not (fits and can_verify):
        return
    measured = Measurement.of_case(case)
    explained_by = [finding.name for finding in report.findings if finding.name != TEMPLATE_MASK]
    acceptance, costs = measured.acceptance(case.expected), measured.costs()
    report.sections["acceptance"] = acceptance | {"explained_by": explained_by if acceptance["is_low"] else []}
    report.sections["costs"] = costs
    fault = measured_fault(acceptance, costs, explained_by)
    report.findings += [] if fault is None else [fault]
