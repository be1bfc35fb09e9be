"""Admission: gives each request an engine, queues it, or refuses it.

`Admission` makes a `Claim` for each request: its predicted cost (`output_lengths`, `claims`). A
request starts at once if an engine has room, else it waits in the queue (`queue`): tenants take
turns by tokens served, a tenant's requests by priority and age. Measured rates (`rates`) predict
the wait, to refuse requests that would miss their deadline.
"""

from octavo.router.admission.admission import Admission
from octavo.router.admission.claims import Claim
from octavo.router.admission.refusals import QueueLimits

__all__ = ["Admission", "Claim", "QueueLimits"]
