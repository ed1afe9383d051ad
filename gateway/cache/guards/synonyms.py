"""Words that ask for the same thing: our own table, of such as hold in nearly every question.

A group is one meaning; its first word is the one all others are read as. Left out on purpose: near-synonyms of which
someone may ask for the one or the other (reset and restart, treatment and cure, city and town). A word of several
meanings does no harm where nobody would set it against the others of its group.
"""

from __future__ import annotations

from typing import Final

GROUPS: Final[tuple[tuple[str, ...], ...]] = tuple(
    tuple(line.split())
    for line in """\
delete remove erase eliminate
quick fast rapid swift
quickest fastest
quicker faster
repair fix mend solve resolve
advantage benefit upside pro merit
disadvantage drawback downside con
begin start commence
buy purchase
cheap inexpensive affordable
expensive costly pricey
big large
bigger larger
biggest largest
small little
best top
tallest highest
easiest simplest
easier simpler
simple easy
reduce lessen decrease shrink lower cut minimize diminish
increase raise
improve enhance boost
baby infant newborn
film movie
build construct
job career occupation profession
choose pick select
happen occur
hard difficult tough challenging
quit stop cease exit
kid child
car automobile
doctor physician
author writer write
help assist aid
answer reply respond response
use utilize employ
need require necessary
obtain acquire get receive
allow permit
forbid prohibit
create make produce generate
calm soothe
method way technique approach manner
important essential crucial vital
main major primary principal chief key
common typical usual
famous well-known renowned
mistake error
problem issue trouble
smart intelligent clever
stupid dumb
flu influenza
image photo picture photograph
television tv
phone telephone smartphone
computer pc
laptop notebook
fridge refrigerator
exam examination test
ad advert advertisement
maths math mathematics
lab laboratory
info information
app application
bike bicycle
airplane plane aeroplane aircraft
petrol gasoline
vacation holiday
cv resume
trash rubbish garbage
eggplant aubergine
zucchini courgette
cilantro coriander
diaper nappy
truck lorry
faucet tap
couch sofa
luggage baggage
apartment flat
house home
shop store
subway metro underground
highway motorway freeway
cab taxi
elevator lift
found establish
finish complete end conclude
enormous huge gigantic
rich wealthy
lawyer attorney
teacher instructor
student pupil
friend buddy pal
coworker colleague
beginner novice newbie
illness disease sickness
sick ill
nation country
goal objective aim target
result outcome
cost price
reason cause
effect impact consequence influence
difference differ distinguish distinction different
similarity alike similar
compare comparison
ingredient constituent
location place spot
center centre middle
trip journey
speak talk
see view
change alter modify update
find locate
search lookup
show display
check verify cheque
execute run
setup configure
connect link
split separate
reserve book
learn study
attempt try
keep maintain
notify inform
clean wash
cook prepare
work operate
understand comprehend grasp
remember recall
remain stay
leave depart
reach arrive
hire recruit
dismiss fire
defeat beat
rule govern
contain include
symptom sign
remedy cure
treatment treat
medicine medication drug
expert specialist
skill ability
fee charge
warranty guarantee
shipping delivery
company firm business corporation
website site
customer client
salary wage pay
income earnings
homework assignment
subject topic
step stage phase
type kind sort category
amount quantity
example instance
story tale
video clip
password passcode
invent devise
collect gather
translate translation
summary summarize synopsis recap
calculate compute
evaluate assess
recommend suggest
advice tip
idea suggestion
program programme
color colour
gray grey
tire tyre
defense defence
license licence
offense offence
aluminum aluminium
mother mom mum
father dad
grandmother grandma
grandfather grandpa
belly stomach tummy
undo revert
folder directory
javascript js
typescript ts
python py
database db
repository repo
documentation docs
config configuration
kubernetes k8s
postgres postgresql
strange odd weird
odor smell
flavor taste flavour
jewelry jewellery
pajamas pyjamas
skeptic sceptic
mold mould
plow plough
live dwell reside
visit tour
tasty delicious
frightening scary
afraid scared
senior elderly
handle cope
peak summit
annual yearly
area region
conversation chat
clothes clothing apparel garment
gift present
meal dish
dinner supper
beverage drink
exercise workout
attraction sight
risk danger hazard
dangerous hazardous risky
safe secure
healthy nutritious
interesting fascinating
boring dull
beautiful pretty gorgeous
funny humorous hilarious
happy glad
sad unhappy
angry mad
nervous anxious
loud noisy
quiet silent
thin slim skinny
modern contemporary
correct proper accurate
wrong incorrect
genuine real authentic
feature characteristic trait attribute
immediately instantly
often frequently
sometimes occasionally
almost nearly
maybe perhaps
enough sufficient
now currently
mandatory compulsory obligatory
pain ache
poisonous toxic
reliable dependable trustworthy
requirement prerequisite
close shut
suitable appropriate
terrible awful
whole entire
strategy tactic
global worldwide
prevent avoid avert
teenager teen adolescent
toddler tot
universe cosmos
rain rainfall
donut doughnut
yogurt yoghurt""".splitlines()
)
