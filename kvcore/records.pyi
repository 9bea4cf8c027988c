# For type checkers records are classes of attrs.

from attrs import NOTHING as NOTHING
from attrs import Attribute as Attribute
from attrs import Factory as Factory
from attrs import asdict as asdict
from attrs import define as define
from attrs import evolve as evolve
from attrs import field as field
from attrs import fields_dict as fields_dict
from attrs import frozen as frozen
from attrs.validators import ge as ge
from attrs.validators import gt as gt
from attrs.validators import in_ as in_
from attrs.validators import le as le
from attrs.validators import optional as optional
