"""May this request run now? Rate, concurrency and budget in one atomic step, and the one settlement that follows.

``service.Admission`` admits; the ``ticket.Ticket`` it gives settles. The rules are in docs/architecture.md, the steps
themselves in the Lua scripts of this package, each with its keys, arguments and replies at its head.
"""
