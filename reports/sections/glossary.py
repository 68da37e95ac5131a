"""The words of the page."""

from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis

SECTION: Section[Analysis] = Section(
    "glossary", "Glossary", "Glossary", lambda analysis: bool(analysis.groups) or None, 95
)
