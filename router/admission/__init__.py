"""Which request gets an engine now, which waits for how long, and which is refused.

`Admission` makes a `Claim` for each request: its predicted cost (`output_lengths`, `claims`).
It gives it an engine at once if one has room, or queues it (`queue`): by priority and age, tenants
in turn by the tokens that each was served. Measured rates (`rates`) predict the wait,
and so which requests to refuse at once.
"""

from octavo.router.admission.admission import Admission
from octavo.router.admission.claims import Claim
from octavo.router.admission.refusals import QueueLimits

__all__ = ["Admission", "Claim", "QueueLimits"]
