use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn client(number: usize) -> Client {
    Client::Key(number.to_string().into())
}

fn load(answers: usize) -> Load {
    Load { answers, prompt_tokens: 10 }
}

const ROOM: Room = Room { running: 2, queued_requests: 8, queued_tokens: None, per_client: None };

#[test]
fn a_client_with_many_requests_does_not_keep_another_waiting() {
    let (greedy, modest) = (client(0), client(1));
    let mut line = Line::new(ROOM);
    assert_eq!([(); 2].map(|()| line.arrive(&greedy, load(1))), [Ok(Arrival::Now); 2]);
    for ticket in 0..4 {
        assert_eq!(line.arrive(&greedy, load(1)), Ok(Arrival::Later(ticket)));
    }
    assert_eq!(line.arrive(&modest, load(1)), Ok(Arrival::Later(4)));
    assert_eq!(line.leave(&greedy, 1), [0]);
    assert_eq!(line.leave(&greedy, 1), [4], "the second turn is the other client's");
    assert_eq!(line.leave(&greedy, 1), [1]);
}

#[test]
fn a_large_request_is_not_overtaken() {
    let (large, small) = (client(0), client(1));
    let mut line = Line::new(ROOM);
    assert_eq!(line.arrive(&small, load(1)), Ok(Arrival::Now));
    assert_eq!(line.arrive(&large, load(2)), Ok(Arrival::Later(0)));
    assert_eq!(line.arrive(&small, load(1)), Ok(Arrival::Later(1)), "though it would fit");
    assert_eq!(line.leave(&small, 1), [0]);
    assert_eq!(line.leave(&large, 2), [1]);
}

#[test]
fn what_gives_up_lets_others_in() {
    let (large, small) = (client(0), client(1));
    let mut line = Line::new(ROOM);
    assert_eq!(line.arrive(&small, load(1)), Ok(Arrival::Now));
    assert_eq!(line.arrive(&large, load(2)), Ok(Arrival::Later(0)));
    assert_eq!(line.arrive(&small, load(1)), Ok(Arrival::Later(1)));
    assert_eq!(line.give_up(&large, 0), [1]);
    assert!(line.give_up(&large, 0).is_empty());
}

#[test]
fn limits() {
    let one = client(0);
    let mut line = Line::new(Room { per_client: Some(3), queued_tokens: Some(15), ..ROOM });
    assert_eq!([(); 2].map(|()| line.arrive(&one, load(1))), [Ok(Arrival::Now); 2]);
    let long = Load { answers: 1, prompt_tokens: 99 };
    assert_eq!(line.arrive(&one, long), Ok(Arrival::Later(0)), "one may wait whatever its size");
    assert_eq!(line.arrive(&one, load(1)), Err(Full::Client(3)));
    assert_eq!(line.arrive(&client(1), load(1)), Err(Full::Tokens(99)));
    let mut line = Line::new(Room { queued_requests: 0, ..ROOM });
    assert_eq!(line.arrive(&one, load(2)), Ok(Arrival::Now));
    assert_eq!(line.arrive(&one, load(1)), Err(Full::Requests(0)));
    // Nothing that was refused is counted.
    assert_eq!((line.leave(&one, 2), line.running, line.waiting()), (vec![], 0, 0));
    assert!(line.accounts.is_empty());
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive {
        client: usize,
        answers: usize,
    },
    /// Of those under way, or of those that wait, the one with this number modulo how many there are.
    Leave(usize),
    GiveUp(usize),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => (0..4usize, 1..=3usize).prop_map(|(client, answers)| Event::Arrive { client, answers }),
        2 => any::<usize>().prop_map(Event::Leave),
        1 => any::<usize>().prop_map(Event::GiveUp),
    ];
    prop::collection::vec(event, 0..200)
}

/// What is known of the line from outside.
#[derive(Default)]
struct Seen {
    running: Vec<(usize, usize)>,
    waiting: BTreeMap<Ticket, (usize, usize)>,
}

impl Seen {
    fn called(&mut self, tickets: Vec<Ticket>) {
        for ticket in tickets {
            let (client, answers) = self.waiting.remove(&ticket).expect("only who waits is called");
            assert!(self.waiting.iter().all(|(later, (other, _))| *other != client || *later > ticket), "in order");
            self.running.push((client, answers));
        }
    }
}

proptest! {
    #[test]
    fn nobody_is_forgotten_or_overtaken(events in events()) {
        let room = Room { running: 4, queued_requests: 10, queued_tokens: Some(80), per_client: Some(8) };
        let mut line = Line::new(room);
        let mut seen = Seen::default();
        let mut order: Vec<usize> = Vec::new();
        for event in events {
            let mut called = Vec::new();
            match event {
                Event::Arrive { client: number, answers } => match line.arrive(&client(number), load(answers)) {
                    Ok(Arrival::Now) => {
                        prop_assert!(seen.waiting.is_empty(), "nobody who waits is overtaken");
                        seen.running.push((number, answers));
                    }
                    Ok(Arrival::Later(ticket)) => {
                        seen.waiting.insert(ticket, (number, answers));
                        if !order.contains(&number) {
                            order.push(number);
                        }
                    }
                    Err(_) => {}
                },
                Event::Leave(number) if !seen.running.is_empty() => {
                    let (number, answers) = seen.running.swap_remove(number % seen.running.len());
                    called = line.leave(&client(number), answers);
                }
                Event::GiveUp(number) if !seen.waiting.is_empty() => {
                    let ticket = *seen.waiting.keys().nth(number % seen.waiting.len()).expect("one");
                    let (number, _) = seen.waiting.remove(&ticket).expect("waits");
                    if seen.waiting.values().all(|(other, _)| *other != number) {
                        order.retain(|other| *other != number);
                    }
                    called = line.give_up(&client(number), ticket);
                }
                _ => {}
            }
            for ticket in called {
                // Turns go round.
                let number = seen.waiting[&ticket].0;
                prop_assert_eq!(order.remove(0), number);
                seen.called(vec![ticket]);
                if seen.waiting.values().any(|(other, _)| *other == number) {
                    order.push(number);
                }
            }
            let running: usize = seen.running.iter().map(|(_, answers)| answers).sum();
            prop_assert!(running <= room.running);
            prop_assert_eq!((line.running, line.waiting()), (running, seen.waiting.len()));
            prop_assert!(line.waiting() <= room.queued_requests);
        }
        // Everyone who stays is called as answers end.
        while let Some((number, answers)) = seen.running.pop() {
            let called = line.leave(&client(number), answers);
            seen.called(called);
        }
        prop_assert!(seen.waiting.is_empty());
        prop_assert!(line.accounts.is_empty() && line.turns.is_empty());
    }
}
