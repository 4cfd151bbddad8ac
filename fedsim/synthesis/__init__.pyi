from .data_set import synthesize as synthesize
from .filters import Screen as Screen
from .leaks import search as search
from .page import Claim as Claim, write_page as write_page
from .quality import Student as Student, measure as measure
from .rows import store_of as store_of, text_of as text_of
