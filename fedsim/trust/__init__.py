"""Why anyone should believe a run: `verify` (evidence, replay), `report` (claim), `audit`.

`audit` plants `canaries` and bounds epsilon from below: from guesses alone (`lower_bound`,
`curve_audit`), and with a premise or two more (`independent_audit`, `noise_audit`); `pages` writes
their pages from `templates`, with the charts of `plots`.
"""
