from . import corpora as corpora
from .building import user_ids as user_ids
from .building.build import BuildSettings as BuildSettings, build as build
from .building.columns import (
    Columns as Columns,
    expected_of as expected_of,
    is_string as is_string,
)
from .building.messages import TOOLS as TOOLS
from .building.sources import is_table as is_table
from .building.tables import source_of as source_of
from .chat import (
    ASSISTANT as ASSISTANT,
    CALLS as CALLS,
    USER as USER,
    ChatTokenizer as ChatTokenizer,
    Message as Message,
    template_of as template_of,
)
from .corpora import load as load
from .dataset import (
    NATS_PER_TOKEN as NATS_PER_TOKEN,
    SPLITS as SPLITS,
    Dataset as Dataset,
    is_held_out as is_held_out,
    read_ids as read_ids,
    shown as shown,
    stats as stats,
    tokenizer_is_public as tokenizer_is_public,
    without as without,
)
from .store import (
    Owners as Owners,
    decided_by_texts as decided_by_texts,
)
from .tokenizer import (
    HUB as HUB,
    TEMPLATE as TEMPLATE,
    Tokenizer as Tokenizer,
    download as download,
)
from .users import UserStore as UserStore
