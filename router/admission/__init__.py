"""Who goes to an engine now, who waits for how long, and who is refused.

A request comes as a `Ticket`. `Admission` estimates what it will cost
(`output_lengths`, `claims`), gives it an engine at once where one has room, or
has it wait in a `FairQueue`: by priority and age, tenants in turn by the tokens
that each was served (`fairness`). What is measured meanwhile (`rates`) says how
long the wait will be, and so whom to refuse at once.
"""

from octavo.router.admission.admission import Admission, Grant
from octavo.router.admission.refusals import QueueLimits
from octavo.router.admission.ticket import Progress, Ticket

__all__ = ["Admission", "Grant", "Progress", "QueueLimits", "Ticket"]
