"""The other languages that the guards know, and the look of those that they don't.

``light``: words that no answer hangs on, accents folded away as ``fold`` does. ``asks``: how a question begins -> its
kind. ``polite``: what may stand before a question or after it and says nothing. All words in no list are content.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.cache.guards import english
from gateway.cache.guards.word_lists import words


class Lexicon(msgspec.Struct, frozen=True):
    light: frozenset[str]
    asks: Mapping[str, str]
    polite: re.Pattern[str]
    negation: frozenset[str]
    direction: frozenset[str]
    time: frozenset[str]
    now: frozenset[str]
    modal: frozenset[str]
    """Verbs and words that push a German or Dutch verb to the end."""
    alike: Mapping[str, str]
    """Forms of a few common verbs -> one of them."""
    endings: re.Pattern[str]


def fold(word: str) -> str:
    """Without the accents that people leave out; German umlauts and the Spanish tilde stay, for they make other
    words."""
    out = []
    for char in word:
        base = unicodedata.normalize("NFD", char)[0]
        out.append(char if char in "äöüñß" or not base.isascii() else base)
    return "".join(out)


def _forms(text: str) -> dict[str, str]:
    return {fold(form): fold(line.split()[0]) for line in text.splitlines() for form in line.split()}


def _asks(text: str) -> dict[str, str]:
    return {fold(phrase.strip()): kind for kind, _, rest in (line.partition(":") for line in text.splitlines())
            for phrase in rest.split(",")}  # fmt: skip


def _lexicon(
    *, light: str, asks: str, polite: str, negation: str, direction: str, time: str, now: str,
    modal: str = "", alike: str = "", endings: str = "(?!)",
) -> Lexicon:  # fmt: skip
    return Lexicon(
        words(fold(light)),
        _asks(asks),
        re.compile(polite.replace("[- ]", " ").replace("-", " ")),
        words(fold(negation)),
        words(fold(direction)),
        words(fold(time)),
        words(fold(now)),
        words(fold(modal)),
        _forms(alike),
        re.compile(endings),
    )


LEXICONS: Final[dict[str, Lexicon]] = {
    "de": _lexicon(
        light="""der die das den dem des ein eine einen einem einer eines ist sind war waren sei wird werden wurde
        wurden hat haben hatte habe hast im in am an auf für mit bei zu zum zur beim es sich ich du er sie wir ihr
        man mich
        mir dich dir mein meine meinen meinem meiner dein deine ihre ihren sein seine uns unser unsere und auch denn
        eigentlich genau mal bitte so da dass was wer wen wem wie wo wann warum wieso welche welcher welches welchen
        kann kannst können könnte könntest soll sollte sollen muss will möchte gibt gib lautet heißt funktioniert um
        dafür daran etwas bin bist als von vom bedeutet bedeuten liegt befindet wort""",
        asks="""what:was ist,was sind,was bedeutet,was
how:wie
who:wer
whom:wen,wem
where:wo,wohin,woher
when:wann,in welchem jahr
why:warum,wieso,weshalb,wozu
count:wie viele,wieviele,wie viel,wieviel
howlong:wie lange
howoften:wie oft
what:welche,welcher,welches,welchen,welchem
explain:erkläre mir,erkläre,erklär mir,erklär,beschreibe,erläutere
list:nenne mir,nenne,liste,zähle
give:gib mir,gib,zeige mir,zeige""",
        polite=r"^(?:hallo|hi|hey|guten tag|bitte|also|kurze frage|danke)\b[\s,:!]*|^(?:bitte )?sagt? mir(?: bitte)?,? "
        r"|^(?:kannst du|können sie|könntest du|könnten sie|würdest du)(?: mir)?(?: bitte)?(?: mal)? (?=\S+.* (?:sagen|"
        r"erklären|verraten|zeigen)\b)|^(?:mir )?(?:bitte )?(?:sagen|erklären|verraten|zeigen),? "
        r"|^ich (?:möchte|würde gerne?|will) wissen,? |^weißt du,? |^erklär(?:e|t)? (?:mir|uns)?(?: bitte)? ?,? "
        r"?(?=wie |warum |was |wer |wo |wann |wieso )|[\s,]+(?:bitte|danke|vielen dank)$",
        negation="nicht kein keine keinen keinem keiner nie niemals ohne weder niemand nichts nirgends kaum außer",
        direction="""vor nach aus ein zu ab gegen über unter oben unten links rechts mehr weniger meist größer kleiner
        als von bis seit während oder nur alle jeder immer hinter neben zwischen öffnen schließen kaufen verkaufen""",
        time="""montag dienstag mittwoch donnerstag freitag samstag sonntag januar februar märz april mai juni juli
        august september oktober november dezember tag tage woche wochen monat jahr jahre stunde stunden minute minuten
        sekunde sekunden morgens abends frühling sommer herbst winter nächste letzte""",
        now="heute morgen gestern jetzt aktuell aktuelle aktuellen derzeit gerade neueste neuesten momentan",
        modal="kann kannst können könnte soll sollte muss zu dass möchte will am",
        alike="kochen koche kocht\nmachen mache macht\nlernen lerne lernt\nerfinden erfunden erfinder",
        endings="(?<=.{4})(?:en|e|n)$",
    ),
    "fr": _lexicon(
        light="""le la les l un une des du de d est sont était a ont au aux en dans pour par que qu qui quoi quel quelle
        quels quelles ce cet cette ces c s se je j tu il elle on nous vous ils elles me m te t mon ma mes ton ta tes son
        sa ses notre votre leur y et comment pourquoi quand combien où ou peux peut puis dois doit faut il-y-a donc
        alors
        aussi bien plait sur avec à ne n si être trouve trouvent situé située signifie mot""",
        asks="""how:comment est-ce que,comment
why:pourquoi est-ce que,pourquoi
when:quand est-ce que,quand,en quelle année
where:où est-ce que,où
who:qui est-ce qui,qui
count:combien
what:qu est-ce que,qu est-ce qu,c est quoi,quel,quelle,quels,quelles,que,quoi,qu
yesno:est-ce que,est-ce qu,est-ce,est-il,est-elle
explain:explique-moi,explique,expliquez,décris
list:cite,liste,énumère
give:donne-moi,donne,montre-moi""",
        polite=r"^(?:bonjour|salut|alors|merci|s'il (?:te|vous) pla[iî]t)\b[\s,:!]*|^(?:dis|dites)[- ]moi,? "
               r"|^(?:peux-tu|"
        r"pouvez-vous|pourrais-tu|pourriez-vous|tu peux|vous pouvez)(?: me| m')? ?(?:dire |expliquer |donner "
        r"|indiquer )|^expliquez?(?:[- ]moi)? (?=comment|pourquoi|qui |où |quand |ce que )|^je (?:voudrais|"
        r"veux|aimerais) savoir |[\s,]+(?:s'il (?:te|vous) pla[iî]t|merci)$",
        negation="pas plus jamais rien aucun aucune sans ni personne sauf non",
        direction="""avant après depuis jusque vers contre sous dessus dessous gauche droite moins meilleur pire
        grand petit
        entre haut bas toujours tous toutes seulement acheter vendre ouvrir fermer""",
        time="""lundi mardi mercredi jeudi vendredi samedi dimanche janvier février mars avril mai juin juillet août
        septembre octobre novembre décembre jour jours semaine semaines mois an ans année années heure heures minute
        minutes seconde secondes matin soir printemps été automne hiver""",
        now="aujourd'hui aujourd hui demain hier maintenant actuel actuelle actuellement récent dernier dernière",
        alike="faire fais fait faites\nexpliquer explique",
        endings="(?<=.{3})(?:er|ez|es?|[sx])$",
    ),
    "es": _lexicon(
        light="""el la los las un una unos unas de del es son era fue está están esta hay en para por que se lo le me
        te mi
        mis tu tus su sus yo tú él ella nosotros y con al como cual cuáles qué quién quiénes dónde cuándo cuánto
        cuántos cuántas cuánta puedo puede puedes debo hago hacer hace ser estar ha han he muy también cual significa
        palabra encuentra encuentran ubicado ubicada queda""",
        asks="""how:cómo
why:por qué
when:cuándo,en qué año
where:dónde,adónde,de dónde
who:quién,quiénes
count:cuántos,cuántas,cuánto,cuánta
what:cuál,cuáles,qué
explain:explícame,explica,explique,describe
list:enumera,lista,nombra
give:dame,muéstrame""",
        polite=r"^[¿¡\s]*(?:hola|por favor|oye|gracias)\b[\s,:!¿]*|^[¿\s]*(?:me )?(?:puedes|podrías|puede"
               r"|podría)(?: por "
        r"favor)? (?:decir(?:me)?|explicar(?:me)?|dar(?:me)?|indicar(?:me)?) |^dime,? (?:por favor,? )?"
        r"|^(?:explícame|explica|explique|cuéntame) (?=por qué|cómo|qué|quién|dónde|cuándo)|^quiero saber |^me "
        r"gustaría saber "
        r"|[\s,]+(?:por favor|gracias)$",
        negation="no nunca jamás nada nadie ningún ninguna ninguno sin ni tampoco excepto salvo",
        direction="""antes después desde hasta hacia contra sobre bajo arriba abajo izquierda derecha más menos mejor
        peor
        mayor menor alto entre o siempre todos todas solo comprar vender abrir cerrar""",
        time="""lunes martes miércoles jueves viernes sábado domingo enero febrero marzo abril mayo junio julio agosto
        septiembre octubre noviembre diciembre día días semana semanas mes meses año años hora horas minuto minutos
        segundo segundos noche tarde primavera verano otoño invierno""",
        now="hoy mañana ayer ahora actual actualmente último última reciente recientes",
        alike="aprender aprendo aprende\npreparar preparo prepara",
        endings="(?<=.{3})(?:os?|ar|er|ir)$|(?<=[aeu][a-zñ]{2})s$|(?<=[lnrd])es$",
    ),
    "it": _lexicon(
        light="""il lo la i gli le l un uno una di del dello della dei degli delle d è e sono era in nel nella nei
        per che chi
        cosa cos come quando dove perché qual quale quali quanto quanti quante quanta si mi ti ci vi io tu lui lei noi
        mio mia tuo suo al alla ai allo agli con su sul sulla posso può puoi devo fare c'è c ci ha hanno ho anche ed
        essere significa parola trova trovano situato situata""",
        asks="""how:come
why:perché
when:quando,in che anno,in quale anno
where:dove,dov
who:chi
count:quanti,quante,quanto,quanta
what:qual,quale,quali,che cosa,cosa,cos,che
explain:spiegami,spiega,descrivi
list:elenca,nomina
give:dammi,mostrami""",
        polite=r"^(?:ciao|salve|per favore|allora|grazie|scusa)\b[\s,:!]*|^(?:mi )?(?:puoi|potresti|può"
               r"|potrebbe) (?:dirmi|"
        r"dire|spiegarmi|spiegare) |^dimmi,? |^spiega(?:mi)? (?=come|perché|che |cosa|chi |dove|quando)|^vorrei "
        r"sapere |[\s,]+(?:per favore|per piacere|grazie)$",
        negation="non no mai niente nulla nessuno nessun nessuna senza né neanche tranne",
        direction="""prima dopo da dal dalla fino verso contro sopra sotto sinistra destra più meno meglio peggio
        maggiore
        minore tra fra o sempre tutti tutte solo comprare vendere aprire chiudere""",
        time="""lunedì martedì mercoledì giovedì venerdì sabato domenica gennaio febbraio marzo aprile maggio giugno
        luglio
        agosto settembre ottobre novembre dicembre giorno giorni settimana settimane mese mesi anno anni ora ore minuto
        minuti secondo secondi mattina sera notte primavera estate autunno inverno""",
        now="oggi domani ieri adesso attuale attuali attualmente recente recenti ultimo ultima",
        alike="preparare preparo prepara\nfare faccio fa",
        endings="(?<=.{3})(?:are|ere|ire|o)$",
    ),
    "pt": _lexicon(
        light="""o a os as um uma uns umas de do da dos das é são era foi está há em no na nos nas para por que se me
        te meu
        minha seu sua eu tu ele ela nós você vocês e com ao à como qual quais quem onde quando quanto quantos quantas
        posso pode poderia devo faço fazer faz tem ser fica ter pelo pela também porque significa palavra localizado
        localizada""",
        asks="""how:como
why:por que,porque,por quê
when:quando,em que ano
where:onde,aonde
who:quem
count:quantos,quantas,quanto,quanta
what:qual,quais,o que,que
explain:explique,explica,descreva
list:liste,cite,enumere
give:me dê,mostre""",
        polite=r"^(?:olá|oi|por favor|obrigad[oa])\b[\s,:!]*|^(?:você )?(?:pode|poderia|podes)(?: me)? (?:dizer"
               r"|explicar"
        r"|dizer-me) |^(?:me )?(?:diga|diz)(?:-me)?,? |^(?:gostaria de|quero) saber |^(?:explique"
        r"|explica)(?:-me)? (?=o que|como|"
        r"por que)|[\s,]+(?:por favor|obrigad[oa])$",
        negation="não nunca jamais nada ninguém nenhum nenhuma sem nem exceto",
        direction="""antes depois desde até contra sobre sob acima abaixo esquerda direita mais menos melhor pior
        maior menor
        entre ou sempre todos todas só comprar vender abrir fechar ligar desligar""",
        time="""segunda terça quarta quinta sexta sábado domingo janeiro fevereiro março abril maio junho julho agosto
        setembro outubro novembro dezembro dia dias semana semanas mês meses ano anos hora horas minuto minutos segundo
        segundos manhã tarde noite primavera verão outono inverno""",
        now="hoje amanhã ontem agora atual atuais atualmente recente último última",
        endings="(?<=.{3})(?:os?|ar|er|ir)$|(?<=[ae][a-z]{2})s$",
    ),
    "nl": _lexicon(
        light="""de het een van is zijn was waren wordt worden werd werden heeft hebben had in op aan voor met bij te
        om er
        dat die dit deze ik je jij u hij ze zij we wij men mijn jouw uw en ook eigenlijk nu dan zo wat wie waar wanneer
        waarom hoe welke welk kan kun kunt kunnen zou moet moeten wil mag heet gaat geef doe doen bent ben mij me
        betekent woord ligt""",
        asks="""how:hoe
why:waarom
when:wanneer,in welk jaar
where:waar,waarheen
who:wie
count:hoeveel
howlong:hoe lang
what:wat,welke,welk
explain:leg uit,beschrijf,verklaar
list:noem,som
give:geef me,geef,toon""",
        polite=r"^(?:hallo|hoi|hey|alsjeblieft|dag|bedankt)\b[\s,:!]*|^(?:kun|kan|kunt|zou) (?:je|jij|u)(?: me| "
               r"mij)? (?:"
        r"alsjeblieft )?(?:vertellen|zeggen|uitleggen),? |^(?:vertel|zeg) (?:me|mij),? |^leg(?: me| mij)? uit,? "
        r"(?=hoe|waarom|wat|wie|waar|wanneer)|^ik wil(?: graag)? weten |[\s,]+("
        r"?:alsjeblieft|alstublieft|bedankt|dank je)$",
        negation="niet geen nooit zonder noch niemand niets nergens nauwelijks behalve",
        direction="""voor na naar uit tegen over onder boven links rechts meer minder meest groter kleiner dan tot sinds
        tijdens of alleen alle altijd achter naast tussen open dicht kopen verkopen""",
        time="""maandag dinsdag woensdag donderdag vrijdag zaterdag zondag januari februari maart april mei juni juli
        augustus september oktober november december dag dagen week weken maand jaar jaren uur uren minuut minuten
        seconde ochtend avond lente zomer herfst winter""",
        now="vandaag morgen gisteren nu actueel actuele huidige momenteel recent laatste nieuwste",
        modal="kan kun kunt kunnen zou moet te om dat wil",
        alike="maken maak maakt\nkoken kook kookt\nwerken werk werkt",
        endings="(?<=.{4})(?:en|e)$",
    ),
}  # fmt: skip

STRANGERS: Final = words(
    fold(
        """jest jak czy sie nie dla który gdzie kiedy dlaczego jaka jaki ile co są na och är vad hur att för inte som
        det den
    ett av hvad hvor hvordan og er ikke jeg på til af hva hvem hvilken heter jeg mikä missä miten kuka milloin onko ja
    ovat hogyan mi hol mikor miért egy az és van nem bir ve nedir nasıl ne kim nerede için bu mı apa yang adalah
    bagaimana siapa di mana kapan mengapa dan ini itu untuk dengan ce este cum unde când care și sunt pentru din la
    quina què és com amb perquè els i la kje kako zašto gdje kada tko je su što jaký kde kdy proč jaké jsou alin ano
    saan paano kailan bakit ang ng mga sa kung nini ni wapi vipi kwa cén cá conas co je kto sú kur kas kaip yra kāds
    kas ir kur mis kes kus kuidas"""
    )
)
"""Function words of Latin-written languages that the guards do not know; those that a known one shares do not count."""

LIGHT: Final[dict[str, frozenset[str]]] = {"en": english.LIGHT | english.NEGATION} | {
    name: lexicon.light | lexicon.negation for name, lexicon in LEXICONS.items()
}
