"""Names for runs that people can say and remember: ``brisk-otter-412``."""

from __future__ import annotations

import secrets
from pathlib import Path

_FIRST = """
able agile airy alert amber apt arid ashen avid azure balmy bold bonny brave breezy brisk bronze
calm candid civil clear clever cobalt cool coral cosy crisp curly dapper daring deft dewy eager
early easy fair fancy fast fleet fond free fresh frosty gentle giddy glad gold grand green hale
handy happy hardy hazy hearty humble ideal ivory jade jolly jovial keen kind lavish level light
lilac lively loyal lucid lucky lunar mellow merry mild mint misty modest neat nimble noble olive
open opal pale pearl perky plucky polite prime proud pure quick quiet rapid rare ready regal rosy
royal ruby sage sandy sharp shiny silent silver sleek smart snowy solar solid sonic spry stable
steady still stout sunny swift tame tawny tidy topaz trim true vast velvet vivid warm wise witty
young zesty
"""
_SECOND = """
adder alpaca ant badger bass bat bear beaver bee beetle bison boar bream bunting camel carp cat
chick civet clam cobra cod condor coot coyote crab crane cricket crow cub cuckoo curlew deer dingo
dove duck dunlin eagle eel egret elk ermine falcon fawn ferret finch fox frog gecko gibbon goat
goose grebe grouse gull hare hawk hen heron hornet horse hound ibex ibis impala jackal jay kite
kiwi koala lark lemur linnet lion lizard llama lynx magpie marlin marten martin mink mole moose
moth mouse mule newt ocelot okapi oriole osprey otter owl ox panda parrot pika pike plover pony
puffin puma quail rabbit raven robin rook salmon seal shark shrew shrike siskin skua skunk sloth
snail sparrow squid stag starling stoat stork swan swift tapir teal tern thrush tiger toad trout
turtle viper vole walrus wasp weasel whale wolf wombat wren yak zebra
"""


def new_name(runs: Path, kind: str = "") -> str:
    """Return a name that no folder in `runs` has; `kind` is its first word.

    Two processes may draw the same at once. `RunFolder.create` lets one of them have it.
    """
    while True:
        number = 10 + secrets.randbelow(990)
        words = (kind, *map(secrets.choice, (_FIRST.split(), _SECOND.split())), str(number))
        name = "-".join(filter(None, words))
        if not (runs / name).exists():
            return name
