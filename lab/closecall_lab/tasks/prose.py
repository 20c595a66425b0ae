"""A piece of prose to hide needles in, written for this purpose. It has no digits: no number is there by chance."""

TEXT = """\
The town of Merrow stands where a slow brown estuary gives itself up to the sea. Nobody knows who built the first
house there, though several families claim the honour. On clear mornings you can count the fishing boats from the
church steps, and on foggy ones you can hear them instead. The fog has a habit of arriving without any warning and
leaving without an apology.

Ada Pell came to Merrow to write about seaweed. She had a grant that was meant to last for two years, a secondhand
microscope, and an aunt who still remembered how to pickle herring. Her room was above the chandlery, and it smelled
of tar and rope. She said that she did not mind the smell, and after a month it was true. Each day she walked to the
rocks below the lighthouse and filled her jars. What looked like a single green carpet turned out, under glass, to be
a crowded city. There were weeds that shone like wet leather and weeds as fine as hair. Some of them, she wrote, grow
only where a certain kind of limpet has been grazing. Others seemed to need nothing but a crack in the stone and a
little patience.

The lighthouse keeper watched her through his telescope and pretended that he was looking for ships. His name was
Tobias Wray, and he had not spoken to a scientist before. He imagined that they were all short of time and sharp of
tongue. When she finally knocked on his door to borrow a bucket, he was so surprised that he gave her three. They
became friends over the matter of the buckets. He taught her to read the weather from the colour of the water near the
bar. She taught him the Latin names of the things he had been scraping off the slipway for half his life. It pleased
him that the slime had a title.

Old Merrow had been a place of some importance once. Ships carrying wool had queued in the channel for a berth, and
the custom house employed eleven clerks. Then the river moved, as rivers do, and a bank of sand rose up across the
mouth of the harbour. The larger ships went elsewhere and did not come back. For a while the merchants talked of
dredging, of a railway, of a canal. They talked for so long that most of them died of it. The custom house became a
school, then a store for nets, and then a school once more. Children learned their sums beneath a painted ceiling of
tritons and scales.

The teacher, Miss Orla Finch, believed that the ceiling did half of her work. A child who is bored will look up, she
said, and there is always something up there to wonder about. Her pupils could identify every figure by the age of
seven. They were less reliable on the subject of long division. In winter the stove smoked so badly that the lessons
were held in the sail loft next door. Those were the best lessons, everyone agreed afterwards, although no one could
say exactly what had been taught.

There is a bakery in Merrow that opens at four in the morning and closes when the bread is gone. The baker does not
put a sign in the window, because the smell is sign enough. He learned his trade from his mother, who learned it from
a Portuguese cook with a wooden leg. The dough is left to rise in the room behind the oven, where a cat keeps it
company. It is understood that the cat is on duty. Visitors sometimes complain about the hours. The baker listens
politely and goes on opening at four.

That spring a stranger took the empty cottage at the end of Rope Walk. He received no letters and bought his lamp oil
in large amounts. Within a week the town had decided that he was a forger, a poet, or a retired detective. In fact he
was tuning bells. He had a set of twelve small ones from a chapel that had been pulled down inland, and he wanted to
bring them back into agreement. All night he struck them softly and filed a little bronze from their rims. The sound
was so faint that people thought they had dreamed it. When the secret came out there was some disappointment, for a
forger would have been more interesting. But the bells were hung in the school porch, and even the disappointed
admitted that they sounded well.

Rain fell for most of April. The gutters ran, the cellars filled, and the ducks walked about in the street as though
they had bought it. Ada stayed indoors and sorted her drawings. She found that she had sketched the same weed on nine
different days and given it nine different names. This upset her at first. Then she laid the sheets in a row and saw
the plant grow up, flower in its fashion, and fray at the edges. She had not discovered nine species, only one life.
It was, she told Tobias, the most useful mistake she had ever made. He replied that he had been making useful mistakes
for years and had never been paid for any of them.

The ferry across the estuary is pulled along a chain. It takes a dozen passengers, or one cart and a nervous horse.
The ferryman does not like to be hurried, and he has arranged things so that he cannot be. Halfway over, the chain
grumbles and the deck shivers, and first-time travellers reach for the rail. Beyond the far landing the road climbs
through gorse to the moor. From the top you can see both the sea and the hills, and it is customary to stop there and
say nothing for a minute. A flat stone marks the place. Someone has carved a ship on it, and someone else has
corrected the rigging.

The moor belongs to the sheep, whatever the deeds may say. They stand in the road and consider each traveller on his
merits. In summer the heather turns the slopes purple and the bees work until dark. Honey from the moor is nearly
black and tastes faintly of smoke. It is sold by an elderly brother and sister who have not agreed on a price since
their father died. You must ask them separately and then choose. Both will tell you the other is generous to a fault.

In June the surveyors arrived with their poles and notebooks. They had been sent to find out whether the sandbank
could be cut after all. The oldest inhabitants looked on with the calm of people who had seen surveyors before.
Measurements were taken at high water and at low, and a small flag was planted on the bar. By the next morning the
flag was gone and so was that part of the bar. The chief surveyor laughed, which was the first thing that anyone had
liked about him. He wrote in his report that the harbour mouth was less a place than a disposition. The report was
filed, and Merrow returned to its ordinary concerns.

Ada helped the surveyors to date the sand. She showed them layers of shell and dark silt in the bank, laid down like
the pages of a ledger. A thin band of ash ran through all of them at the same height. It came from a volcano far to
the north, she explained, in a year when the harvest failed everywhere. Tobias searched the old lamp books in the
tower and found an entry that matched. The keeper of that time had complained of red sunsets and a taste of metal. He
had also complained about the price of candles, as every keeper did.

The tower holds one hundred and some steps; nobody has agreed on the figure, because the lowest are buried. The lamp
itself is no taller than a child. Its light is gathered by rings of glass, each ground to its own angle, and thrown
out flat over the water. Before the glass there had been a coal fire in an iron basket. On stormy nights it burned a
ton of coal and lit chiefly the underside of the smoke. Sailors said that they steered by the smell. Progress, in
Tobias's opinion, was a matter of wasting less and seeing further. He polished the rings every afternoon with a cloth
so soft that it was kept in a drawer of its own.

A travelling company came in August to act a comedy in the market square. The rain held off until the last scene, and
then it joined in. The actors carried on beneath umbrellas handed up by the crowd. It was agreed that the wedding had
never been so convincing. Afterwards there was a supper of crab and new potatoes on long tables in the net store. The
leading lady sang something sad in a language that none of them knew. Even the ferryman wept, although he blamed the
onions. In the morning the carts rolled away, and for weeks the boys of the town fought duels with sticks and rhymed
when they remembered to.

Autumn is the season for mending. Nets are spread over the walls, boats are turned on their backs, and the air is full
of hammering. The cooper sits in his doorway and bends staves around a fire of shavings. He says that a barrel is
nothing more than a good argument with wood. The sailmaker, who is his neighbour, says that wood has no conversation
at all. They have had this talk many times and both look forward to it. Apples come down the river in flat boats, with
straw between the layers. For a few days the whole quay smells of cider, and wasps hold their own market among the
crates.

When her grant was nearly spent, Ada packed her drawings in oilcloth and wrote to the society in the capital. The
answer took a month to come. They thanked her for the specimens and wondered whether she might consider staying
another year. It seemed that a certain small weed in jar fourteen had no name in any book. She read the letter twice
on the church steps while the fog rolled in. Then she went up to the tower to tell Tobias, who was already lighting
the lamp. He asked what she would call it. She had thought about the town, about her aunt, and about the society that
paid the bills. In the end she named it after the bucket.

Winter closed the road over the moor, as it does in most years. The mail came round by sea when it came at all. People
read their newspapers slowly, a column each evening, to make them last. In the chandlery a game of draughts that had
begun before the first snow was still undecided at the thaw. Miss Finch's pupils built a whale out of ice on the
parade, with a barrel hoop for a smile. It outlived the hard weather by nine days and was mourned sincerely. Late in
February the first boat of the year crossed the bar. The bells in the school porch were rung for it, all twelve, more
or less together.

There are larger towns along that coast, and richer ones, and some with better beds. Travellers pass through them, and
sleep soundly, and forget. Few who have spent a night in Merrow forget it, if only because of the cat. The estuary
goes on carrying its mud down to the sea, one grain after another, in no particular haste. The bank grows and shifts
and grows again. On the steps of the church somebody is always counting boats. And above the chandlery, late into the
evening, a lamp still burns beside a secondhand microscope.

Far inland, where the river begins, there is a village that has quarrelled with its own clock. The clock hangs on the
town hall and runs a little fast in dry weather. Farmers who live by it reach the market early and get the best
stalls. Those who live by the sun come later, in a worse temper, with fresher eggs. A watchmaker called Ilse Brandt
was once asked to settle the matter for good. She climbed up with her tools, listened for an hour, and climbed down
again. The clock, she announced, was in perfect order; it was the village that ran slow. They paid her in plums. She
has a workshop under the bridge now and repairs anything that ticks.

Her apprentice is a boy of few words and quick hands. On his first day he took apart a mantel clock and laid out the
pieces by size. On his second he put it together with one wheel left over, and it ran better than before. Ilse kept
the spare wheel on a nail above her bench. It reminds me, she says, that somebody before us was showing off. Customers
ask about it more often than they ask about the prices. The boy has since learned that a repair is finished when
nobody can tell where it was done. He is still learning how to talk to people while he works.

Upstream the valley narrows and the walls of rock lean together. Swifts nest there in such numbers that the air seems
to be torn and sewn up again all day. A path was cut along the cliff by monks who wanted to be left alone. It worked
so well that their abbey was lost for a century and found by a goat. Only the kitchen still has its roof. Hikers boil
their tea in the great hearth and write their names in the soot. There is a spring behind the chapel wall whose water
is so cold that it makes the teeth ring. The monks are said to have cured toothache with it, or at least to have
changed the subject.

Above the trees a small observatory faces the southern sky. Two astronomers share it, and they share one coat as well.
While one sleeps the other counts variable stars and keeps the fire going. In bad weather they play chess by leaving a
single move on the table at the end of each shift. Their longest game has lasted since the summer before last. Neither
will say who is winning. The stars they study grow bright and dim over many months, as though something out there were
breathing. Every measurement is a dot on a sheet of squared paper. It takes a great many dots before a curve will show
itself, and a certain stubbornness not to draw it too early.

Supplies go up to them by mule on the first dry day of the week. The mule knows the way and is not interested in
advice. She carries flour, paraffin, photographic plates, and whatever the postmistress has read and finished with.
Coming down she carries empty tins and a bundle of letters. Once she arrived with nothing at all but a note pinned to
her collar. It said that the comet was real, that they were both well, and that somebody should please send coffee.
The postmistress read it aloud on the steps of the town hall. For that one evening the clock was forgotten, and the
whole village stood in the lane with their heads tipped back.
"""
