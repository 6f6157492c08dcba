"""Trains the tokenizer that ships as `lightning_embodied/packing/instruction_tokenizer.json`.

A byte-level BPE (as GPT-2's) of 1,000 tokens: every string encodes, and robot instructions, written out here as a
grammar of verbs, objects and places, take about one token a word. Run from the repository's root:

    python docs/train_instruction_tokenizer.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 1000
DESTINATION = Path(__file__).resolve().parent.parent / "lightning_embodied" / "packing" / "instruction_tokenizer.json"


def words(text: str) -> list[str]:
    """The words of `text`."""
    return text.split()


def phrases(text: str) -> list[str]:
    """The phrases of `text`, between bars."""
    return text.split("|")


COLOURS = words("red green blue yellow orange purple white black brown grey gray pink silver wooden")
SIZES = words("small large big tall left right front back middle top bottom nearest")
OBJECTS = words(
    "block cube ball puck peg nut bottle can cup mug bowl plate pan pot lid spoon fork knife spatula sponge towel "
    "cloth shirt napkin banana apple orange carrot corn eggplant potato lemon peach bread cheese chocolate pudding "
    "milk juice ketchup soup sauce dressing salad butter popcorn box basket tray rack shelf cabinet cupboard fridge "
    "drawer door window handle knob button lever switch dial faucet valve wrench hammer screwdriver stick plug socket "
    "cable key lock coin marker pen pencil eraser book caddy moka stove burner microwave oven sink toaster kettle "
    "coffee machine laptop keyboard mouse phone cord battery toy duck bear robot arm gripper tool cylinder triangle "
    "disk ring pad mat table desk counter stand wall hole slot goal target bin trash hoop basketball soccer "
    "dishwasher alphabet cream tomato barbecue sandwich hamburger cookie biscuit cereal teapot jar glass tape"
)
PLACES = phrases(
    "on top of|into|in|inside|onto|on|next to|to the left of|to the right of|behind|in front of|under|over|near|"
    "between|out of|away from|from|through|towards|against"
)
TRANSFERS = phrases("put|place|move|pick up|push|pull|slide|insert|stack|drop|bring|carry|throw|set|lay|hang|transfer")
ACTIONS = phrases(
    "open|close|turn on|turn off|press|rotate|twist|unlock|lock|grasp|lift|reach|reach for|hold|wipe|fold|unfold|pour|"
    "sweep|unplug|plug in|flip|shake|clean|empty|fill|take|get|find|touch|point at|hand over|assemble|disassemble|hit"
)
SENTENCES = (
    "go straight and then turn around",
    "turn left, then move forward",
    "turn right and stop in front of the table",
    "press the button from the top with the gripper",
    "pick up the object and place it at the goal position",
    "bypass a wall and reach a goal position",
    "rotate the dial by 180 degrees and the lever by 90 degrees",
    "wait until the robot has finished, then repeat it again",
    "please do both tasks with your left hand and your right hand",
    "sort all the objects by color and colour",
    "make a cup of coffee and bring it to me",
    "kick the soccer ball into the goal and dunk the basketball into the basket",
    "insert the gripper into the hole and pull the door open with a handle",
    "sweep the puck off the table without touching the other one",
    "What should the robot do? First, it should pick up each of the three items.",
    "step 0 1 2 3 4 5 6 7 8 9 10 of 100",
)


def corpus() -> list[str]:
    """Instructions in a fixed order, each object and colour about equally often."""
    colour, size, place = itertools.cycle(COLOURS), itertools.cycle(SIZES), itertools.cycle(PLACES)
    transfer, target = itertools.cycle(TRANSFERS), itertools.cycle(reversed(OBJECTS))
    lines = [line for line in SENTENCES for _ in range(40)]
    for thing in OBJECTS:
        for action in ACTIONS:
            lines.append(f"{action} the {thing}")
            lines.append(f"{action} the {next(size)} {thing} {next(place)} the {next(target)}")
        for _ in range(3 * len(PLACES)):
            lines.append(f"{next(transfer)} the {next(colour)} {thing} {next(place)} the {next(colour)} {next(target)}")
            lines.append(f"{next(transfer)} the {thing} and the {next(target)} {next(place)} a {next(target)}")
    return lines + [line.capitalize() + "." for line in lines[::4]]


def train() -> Tokenizer:
    """The tokenizer; the same at every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


if __name__ == "__main__":
    train().save(str(DESTINATION))
    print(f"wrote {DESTINATION}")
