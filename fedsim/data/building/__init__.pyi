from . import readers as readers, sources as sources, user_ids as user_ids
