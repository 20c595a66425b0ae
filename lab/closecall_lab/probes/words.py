"""The probes' vocabulary, about a thousand words, and their word-level tokenizer.

Four kinds of words: marks with a role in the format, keys (what an entry is filed under, and what a pointer points to),
values (what a chain ends in), and filler words by part of speech. No word is of two kinds, and each kind is one range
of ids, so an id tells its kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START = "<pad>", "<unk>", "<start>"
END, ARROW, ASK = ".", "->", "ask"
MARKS = (PAD, UNKNOWN, START, END, ARROW, ASK)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KEYS = _listed(
    """
    aardvark albatross alligator alpaca ant anteater antelope ape armadillo baboon badger barracuda bat bear beaver
    bee beetle bison boar buffalo butterfly camel canary capybara caribou carp cat caterpillar cheetah chicken
    chimpanzee chinchilla chough clam cobra cockroach cod condor cormorant coyote crab crane cricket crocodile crow
    curlew deer dingo dog dolphin donkey dormouse dove dragonfly duck dugong eagle echidna eel eland elephant elk emu
    falcon ferret finch firefly flamingo fox frog gazelle gecko gerbil gibbon giraffe gnat gnu goat goldfish goose
    gorilla grasshopper grouse gull hamster hare hawk hedgehog heron herring hippo hornet horse hummingbird hyena ibex
    ibis iguana impala jackal jaguar jay jellyfish kangaroo kingfisher kiwi koala kudu lapwing lark lemming lemur
    leopard lion lizard llama lobster locust loris lynx macaw magpie mallard mammoth manatee mandrill mantis marmot
    marten meerkat mink mole mongoose monkey moose mosquito mouse narwhal newt nightingale ocelot octopus okapi
    opossum orca ostrich otter owl oyster panda panther parrot partridge peacock pelican penguin pheasant pigeon
    piranha platypus polecat pony porcupine porpoise puffin puma python quail quokka rabbit raccoon ram rat raven
    reindeer rhino robin rook salamander salmon sardine scorpion seahorse seal shark sheep shrew shrimp skunk sloth
    snail snake sparrow spider squid squirrel starling stoat stork swallow swan tapir tarsier termite tiger toad
    tortoise toucan trout turkey turtle viper vole vulture wallaby walrus warthog wasp weasel whale wildcat wolf
    wolverine wombat woodcock woodpecker worm wren yak zebra abacus accordion adze anchor anvil apron arrow awl axe
    bagpipe balloon banjo barrel basin basket bassoon beacon bell bellows bench bicycle binoculars blanket bobbin bolt
    bonnet bottle bowl bracelet brick bridle broom brush bucket buckle bugle button cabinet cable candle cannon canoe
    canvas cart casket cello chain chair chalk chariot chest chisel clamp clarinet cloak clock compass cork cradle
    crate crown crutch cup curtain cushion cymbal dagger desk dial drum dulcimer easel engine envelope fan feather
    fiddle flask flute fork funnel gavel gear goblet gong guitar hammer hammock harness harp hatchet helmet hinge hook
    horn jacket jar jug kettle key kite knapsack knife ladder ladle lamp lantern lathe lens lever locket loom lute
    mallet mandolin mask mirror mitten mop mortar mug nail needle net oboe organ paddle padlock pan parasol pen pencil
    pendulum piano pillow pipe pitcher plough pulley pump purse quill racket raft rake razor ribbon ring rope rudder
    ruler saddle sail sandal saw saxophone scarf scissors screw scythe shield shovel sickle sieve skate sled spade
    spear spindle spoon stapler stool sundial sword tablet teapot telescope tent thimble tongs torch trombone trowel
    trumpet tuba umbrella vase violin wagon wheel whistle wrench zither
    """
)
VALUES = _listed(
    """
    amber amethyst apricot aqua ash auburn azure beige black blue bronze brown burgundy cerise charcoal chestnut
    cobalt copper coral cream crimson cyan ebony ecru emerald fuchsia ginger gold green grey hazel indigo ivory jade
    khaki lavender lemon lilac lime magenta mahogany maroon mauve mint mustard navy ochre olive onyx opal orange
    orchid peach pearl pewter pink platinum plum puce purple quartz red rose ruby russet rust saffron sapphire scarlet
    sepia sienna silver tan taupe teal topaz turquoise umber vermilion violet white yellow zinc almond apple artichoke
    asparagus aubergine avocado bacon bagel banana barley basil bean beetroot biscuit blackberry blueberry bread
    broccoli brownie butter cabbage cake caramel cardamom carrot cashew cauliflower celery cereal cheese cherry
    chickpea chili chive chocolate cinnamon clove cocoa coconut coffee cookie coriander cranberry cress croissant
    cucumber cumin currant curry custard date dill doughnut dumpling elderberry fennel fig fudge garlic gherkin
    gooseberry grape guava ham hazelnut honey jam jelly kale ketchup lasagne leek lentil lettuce liquorice lychee
    mango maple marmalade marzipan melon millet molasses muesli muffin mushroom nectarine noodle nougat nutmeg oat
    okra onion oregano pancake papaya paprika parsley parsnip pasta pastry peanut pear pecan pepper pickle pineapple
    pistachio pizza polenta porridge potato pretzel pudding pumpkin quince radish raisin raspberry rhubarb rice
    rosemary rye sage salad salami salt sausage sesame shallot sherbet sorbet soup spinach strawberry sugar syrup
    tangerine tapioca tarragon tart thyme toast tofu tomato treacle truffle turmeric turnip vanilla vinegar waffle
    walnut watercress wheat yogurt
    """
)
FILLER = {
    "article": _listed("the a this that one some every another each no"),
    "adjective": _listed(
        """
        old young small large quiet loud early late bright dark cold warm distant nearby narrow wide empty full heavy
        light simple strange gentle rough smooth shallow deep slow quick ancient modern humble proud patient restless
        careful careless honest curious cheerful gloomy familiar foreign formal sudden steady silent sturdy fragile
        modest generous clever plain ordinary rare common central remote rural northern southern eastern western
        endless brief annual weekly daily private public former recent likely second third final
        """
    ),
    "noun": _listed(
        """
        river road village market garden harbour station library office school hospital museum theatre bridge tower
        castle mountain valley forest meadow field farm island beach coast lake street corner square window door wall
        roof floor kitchen cellar attic hall room yard gate fence path letter book story song picture map journal
        newspaper ticket meeting journey visit question answer idea plan promise secret rumour reason decision habit
        lesson teacher student farmer sailor soldier doctor lawyer painter writer singer dancer baker butcher
        carpenter tailor miller merchant traveller stranger neighbour cousin uncle aunt brother sister father mother
        child friend guest king queen winter summer spring autumn morning evening night week month year century storm
        rain snow wind cloud shadow sound
        """
    ),
    "verb": _listed(
        """
        walked stood waited turned stopped started worked rested slept woke laughed smiled cried sang danced played
        talked listened looked stared hurried wandered travelled arrived departed returned stayed remained lived grew
        changed moved climbed fell soared floated drifted sailed rode ran jumped sat knelt leaned paused continued
        vanished appeared gathered settled faded glowed shone burned froze melted trembled whispered shouted
        """
    ),
    "adverb": _listed(
        """
        slowly quickly quietly loudly gently calmly gladly sadly softly often seldom always never again twice once
        soon today yesterday tomorrow together alone abroad upstairs outside inside everywhere somewhere indeed
        perhaps almost
        """
    ),
    "preposition": _listed(
        "near behind beyond beside above below across around through towards under over along against within past"
    ),
}

# Spans of ids by kind: (first, end).
SPANS: dict[str, tuple[int, int]] = {}


def _vocabulary() -> tuple[str, ...]:
    vocabulary: list[str] = []
    seen: dict[str, str] = {}
    for kind, group in {"mark": MARKS, "key": KEYS, "value": VALUES, **FILLER}.items():
        for word in group:
            if word in seen:
                raise ValueError(f"the word {word!r} is listed twice in the probes' vocabulary: {seen[word]}, {kind}")
            seen[word] = kind
        SPANS[kind] = (len(vocabulary), len(vocabulary) + len(group))
        vocabulary += group
    return tuple(vocabulary)


VOCABULARY = _vocabulary()
IDS = {word: number for number, word in enumerate(VOCABULARY)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words are split at white space; `<start>` is put in front, as the probes were trained with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, IDS[START])])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
