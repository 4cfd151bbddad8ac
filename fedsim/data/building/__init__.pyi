from . import user_ids as user_ids
