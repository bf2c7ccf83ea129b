"""Kind `chat`: stories, explanations, advice, plans and letters, from our own templates."""

from __future__ import annotations

import functools

from .chat_topics import (
    ADVICE_TOPICS,
    EXPLANATION_TOPICS,
    LETTER_TOPICS,
    PLAN_TOPICS,
    STORY_TOPICS,
)
from .prompt import Prompt, user_prompt

_REQUESTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "story": (
        STORY_TOPICS,
        (
            "Write a short story about {topic}. Begin in the middle of the action, let the reader "
            "discover the place by its sounds and smells, and end with a small surprise.",
            "I would like to read a bedtime story to my daughter, who is six. Please tell one "
            "about {topic}, with a gentle ending and a few lines of dialogue.",
            "Write the opening scene of a film about {topic}: the setting, the main character, "
            "what that character wants, and what stands in the way. Use the present tense.",
        ),
    ),
    "explanation": (
        EXPLANATION_TOPICS,
        (
            "Can you explain {topic}? I left school a long time ago, so please use everyday words "
            "and one comparison from the kitchen or the garden.",
            "I have to give a five-minute talk about {topic}. Write the text of the talk with an "
            "introduction, three main points and a closing sentence.",
            "Write a dialogue between a curious student and a patient teacher about {topic}. The "
            "student should ask at least four questions and get one thing wrong at first.",
        ),
    ),
    "advice": (
        ADVICE_TOPICS,
        (
            "I need some advice on {topic}. I have tried a few things already and gave up after a "
            "week. What would you do first, and which mistakes should I avoid?",
            "Give me ten practical tips for {topic}. Number them, keep each to two sentences, and "
            "put the most important one at the top of the list.",
            "Write a conversation in which an experienced friend gives me advice on {topic}. Let "
            "me raise two doubts that most people would have, and let the friend answer kindly.",
        ),
    ),
    "plan": (
        PLAN_TOPICS,
        (
            "Help me plan {topic}. Make a list of what has to be done, in which order, who could "
            "do it, and what it might cost, and point out what people usually forget.",
            "I am responsible for {topic} and I feel a little lost. Ask me nothing: make sensible "
            "assumptions, state them, and write a complete plan that I can change later.",
            "Write a cheerful announcement for {topic}. Say what it is, whom it is for and how to "
            "join, and add a short list of questions and answers at the end.",
        ),
    ),
    "letter": (
        LETTER_TOPICS,
        (
            "Please write a polite letter to {topic}. It should be friendly but clear, no longer "
            "than one page, and close with a concrete request or wish.",
            "Write two versions of an email to {topic}: a formal one, and one that is warm and a "
            "bit humorous. Give each of them a subject line.",
            "Draft a message to {topic}, then explain in a few sentences why you chose this tone "
            "and which sentence I should change if I want to sound firmer.",
        ),
    ),
}


@functools.cache
def chat_prompts() -> tuple[Prompt, ...]:
    """Return every topic with every request that fits it; the topic is the source item."""
    return tuple(
        user_prompt(
            kind="chat",
            prompt_id=f"chat:{sort}:{number}:{variant}",
            item=f"chat:{topic}",
            text=request.format(topic=topic),
        )
        for sort, (topics, requests) in _REQUESTS.items()
        for number, topic in enumerate(topics)
        for variant, request in enumerate(requests)
    )
