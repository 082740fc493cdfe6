"""Stage 1: open a model and read its headers, never a weight."""

from bridge.sources.opening import open_source as open_source
from bridge.sources.source import Source as Source
from bridge.sources.source import SourceBase as SourceBase
from bridge.sources.source import SourceKind as SourceKind
from bridge.sources.source import lazy as lazy
