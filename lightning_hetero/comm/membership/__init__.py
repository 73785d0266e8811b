"""How the ranks of a job agree on who takes part after one has died, frozen or been cut off.

====================  ==============================  ==========================================================
message               from, to                        means
====================  ==============================  ==========================================================
``state``             both ends, first of all         where I stand: leader, last view, what I have acknowledged
``state``             member to coordinator           my training thread has come to ``agree()``
``beat``              both, every 2 s                 I am alive, and have done so many steps
``news``              coordinator to all              who is lost or has left; a new view is wanted
``bye``, ``heard``    one that ends, and the answer   my run is over, or: I have failed
``propose``           coordinator to those to stay    the next view
``ack``               member to coordinator           I shall count that view, whatever happens
``commit``            coordinator to those to stay    all have acknowledged: this is the view
``out``               anybody to one that must end    you have been left out, or too few remain
====================  ==============================  ==========================================================

A member is in one of four phases:

==============  =================================================================  ================================
phase           what it does                                                       ends with
==============  =================================================================  ================================
steady          exchanges heartbeats with the coordinator                          a loss, or somebody asks for a
                                                                                   new view: *changing*
changing        calls ``on_change`` until its training thread calls ``agree()``    ``agree()``: *come*
come            waits for the others; acknowledges what the coordinator proposes   ``commit``: *steady*; or *over*
over            must end: ``agree()`` raises                                       its process
==============  =================================================================  ================================
"""

from lightning_hetero.comm.membership.majority import decide
from lightning_hetero.comm.membership.membership import Membership
from lightning_hetero.comm.membership.terms import Agreed, Event, Terms

__all__ = ["Agreed", "Event", "Membership", "Terms", "decide"]
