"""Real text as batches of token ids: corpora, tokenizers, token files, the loader, and the bigram baseline."""

from functrain.data.bigram import Bigram as Bigram
from functrain.data.bigram import fit_bigram as fit_bigram
from functrain.data.dataset import Dataset as Dataset
from functrain.data.dataset import prepare as prepare
from functrain.data.errors import DataError as DataError
from functrain.data.loader import Loader as Loader
from functrain.data.loader import Prefetch as Prefetch
from functrain.data.loader import Validation as Validation
from functrain.data.token_file import open_tokens as open_tokens
from functrain.data.token_file import write_tokens as write_tokens
from functrain.data.tokenizer import Tokenizer as Tokenizer
from functrain.data.tokenizer import load_tokenizer as load_tokenizer
