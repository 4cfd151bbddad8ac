"""Why anyone should believe a run: `verify` (evidence, replay), `report` (claim), `audit`.

`audit` plants `canaries` and bounds epsilon from below (`lower_bound`); `document` and `svg` write
the pages.
"""
