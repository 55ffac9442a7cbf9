"""The grammar of questions: hundreds of forms per relation, and what is held out of it stays apart."""

import random

from troupellm.training import facts, wordings, wordings_heldout, wordings_noise


def test_fresh_wordings_are_apart_from_the_whole_grammar() -> None:
    for relation in facts.RELATIONS:
        seen = [core.text.lower() for cores in wordings.cores(relation.name, "training").values() for core in cores]
        assert len(wordings_heldout.WORDINGS[relation.name]) == 2
        for wording in wordings_heldout.WORDINGS[relation.name]:
            assert not [text for text in seen if wording.lower().rstrip("?.") == text.rstrip("?.")]


def test_whole_phrases_and_openers_are_held_out_and_hundreds_are_left() -> None:
    for relation in facts.RELATIONS:
        seen = [core for cores in wordings.cores(relation.name, "training").values() for core in cores]
        assert len({core.text for core in seen}) > 200
        whole = "\n".join(core.text for core in seen).lower()
        held = [p for listed in wordings.phrases_of(relation.name) for p in wordings.split(listed)[1]]
        assert len(held) >= 4
        assert not [phrase for phrase in held if phrase.lower() in whole]
        pairs = {(core.frame, core.phrase) for core in seen}
        for part in ("combinations", "openers", "phrases"):
            cores = [core for group in wordings.cores(relation.name, part).values() for core in group]
            assert cores
            assert pairs.isdisjoint((core.frame, core.phrase) for core in cores)


def test_what_training_asks_is_never_a_held_out_combination() -> None:
    rng = random.Random(1)
    held = {
        fact.ask(core.text).lower()
        for fact in facts.FACTS
        for cores in wordings.cores(fact.relation.name, "combinations").values()
        for core in cores
    }
    drawn = [
        wordings.draw(rng, (fact := facts.draw(rng)).relation.name).text.format(s=fact.subject) for _ in range(5000)
    ]
    assert len(held) > 3000
    assert held.isdisjoint(facts.articles(text).lower() for text in drawn)


def test_the_table_has_some_hundred_facts_and_no_question_with_two_answers() -> None:
    assert len(facts.FACTS) > 300
    answers: dict[str, str] = {}
    for fact in facts.FACTS:
        for part in wordings.PARTS:
            for cores in wordings.cores(fact.relation.name, part).values():
                for core in cores:
                    assert answers.setdefault(fact.ask(core.text).lower(), fact.sentence()) == fact.sentence()


def test_follow_ups_stay_with_the_relation() -> None:
    asked = facts.dialogue(random.Random(2))
    assert len(asked) >= 2
    answers = {fact.sentence(): fact.relation.name for fact in facts.FACTS}
    assert len({answers[exchange.assistant] for exchange in asked}) == 1


def test_loose_questions_keep_their_telling_words_and_nothing_held_out_slips_in() -> None:
    rng = random.Random(3)
    changed = 0
    for _ in range(4000):
        fact = facts.draw(rng)
        relation = fact.relation.name
        tidy = fact.ask(wordings.draw(rng, relation).text)
        loose = wordings_noise.loosen(rng, relation, tidy, fact.subject)
        changed += loose != tidy
        words = {word.strip("?.,!:") for word in loose.lower().split()}
        telling = {word.strip("?.,!:") for word in tidy.lower().split()} - wordings_noise.SMALL
        assert telling <= words
        assert set(fact.subject.lower().split()) <= words or fact.subject.lower() in loose.lower()
        held = [p.format(s=fact.subject) for listed in wordings.phrases_of(relation) for p in wordings.split(listed)[1]]
        assert loose == tidy or not [phrase for phrase in held if facts.articles(phrase).lower() in loose.lower()]
    assert changed > 2000
