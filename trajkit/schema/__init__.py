"""The Arrow schema of every table, column by column, with unit and null rule.

Token ids are int32. Positions and lengths count tokens. Unknown is null, never 0.0 or
-1; a null logprob has 0.0 in its bytes, so that a consumer of the raw buffer gets a
finite number. Lists are ``large_list``; small sets of names are dictionary-encoded.

The schema version travels in the table metadata under ``trajkit.version``; a table that
lost its metadata is read as the current version. Turns of version 2 have other message
keys, which are computed again from the bodies (`trajkit.turns.delta.renew_keys`).
"""

from trajkit.schema.engine import SCHEMA_VERSION as SCHEMA_VERSION
from trajkit.schema.engine import SCHEMA_VERSIONS as SCHEMA_VERSIONS
from trajkit.schema.links import BRANCHES as BRANCHES
from trajkit.schema.links import CAUSES as CAUSES
from trajkit.schema.links import DRIFT as DRIFT
from trajkit.schema.links import FINDINGS as FINDINGS
from trajkit.schema.links import LABELS as LABELS
from trajkit.schema.links import LINK_REASONS as LINK_REASONS
from trajkit.schema.links import LINKS as LINKS
from trajkit.schema.links import REGIONS as REGIONS
from trajkit.schema.links import SEGMENT_KINDS as SEGMENT_KINDS
from trajkit.schema.links import TEXT_CAUSES as TEXT_CAUSES
from trajkit.schema.packs import ASSIGNMENT as ASSIGNMENT
from trajkit.schema.packs import PACK_RULES as PACK_RULES
from trajkit.schema.packs import PACK_VIOLATIONS as PACK_VIOLATIONS
from trajkit.schema.packs import PACKS as PACKS
from trajkit.schema.rows import EMPTY_KINDS as EMPTY_KINDS
from trajkit.schema.rows import OPENED_BY as OPENED_BY
from trajkit.schema.rows import OUTPUT_KINDS as OUTPUT_KINDS
from trajkit.schema.rows import OUTPUT_SPANS as OUTPUT_SPANS
from trajkit.schema.rows import ROW_CHECK_KINDS as ROW_CHECK_KINDS
from trajkit.schema.rows import ROW_CHECKS as ROW_CHECKS
from trajkit.schema.rows import ROW_REASONS as ROW_REASONS
from trajkit.schema.rows import ROW_VERSIONS as ROW_VERSIONS
from trajkit.schema.rows import ROWS as ROWS
from trajkit.schema.rows import RULES as RULES
from trajkit.schema.rows import SPAN as SPAN
from trajkit.schema.rows import SPAN_KINDS as SPAN_KINDS
from trajkit.schema.rows import VIOLATIONS as VIOLATIONS
from trajkit.schema.sessions import IMPORT_REPORT as IMPORT_REPORT
from trajkit.schema.sessions import LOSSES as LOSSES
from trajkit.schema.sessions import OBSERVATIONS as OBSERVATIONS
from trajkit.schema.sessions import REPORT as REPORT
from trajkit.schema.sessions import SESSIONS as SESSIONS
from trajkit.schema.sessions import SIMULATION as SIMULATION
from trajkit.schema.sessions import TURN_REWARDS as TURN_REWARDS
from trajkit.schema.turns import AMENDMENT_REASONS as AMENDMENT_REASONS
from trajkit.schema.turns import AMENDMENTS as AMENDMENTS
from trajkit.schema.turns import ATTRIBUTION as ATTRIBUTION
from trajkit.schema.turns import DELTA_FIELDS as DELTA_FIELDS
from trajkit.schema.turns import KEY_BYTES as KEY_BYTES
from trajkit.schema.turns import MESSAGE as MESSAGE
from trajkit.schema.turns import MM_ITEM as MM_ITEM
from trajkit.schema.turns import PAYLOADS as PAYLOADS
from trajkit.schema.turns import ROUTING as ROUTING
from trajkit.schema.turns import TURNS as TURNS
from trajkit.schema.turns import TURNS_DELTA as TURNS_DELTA
from trajkit.schema.turns import WEIGHT_VERSION as WEIGHT_VERSION
